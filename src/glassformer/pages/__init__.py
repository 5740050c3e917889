"""Self-contained HTML pages: one style sheet, and figures as inline SVG."""
