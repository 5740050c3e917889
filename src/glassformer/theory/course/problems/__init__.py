"""The problems: one TOML file with the words and one Python file with the numbers for each group of claims."""
