"""Self-contained HTML pages: jinja2 templates with one style sheet, figures as inline SVG, formulas as MathML."""
