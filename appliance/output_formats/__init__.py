"""Output formats: one declaration that both constrains a reply and parses it."""
