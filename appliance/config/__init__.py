"""The manifest as text, and the settings it becomes: YAML with positions, sources with precedence, suggestions."""
