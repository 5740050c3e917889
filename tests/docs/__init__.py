"""The blocks and commands of README.md and docs/, executed."""
