"""Request fields outside a route's schema: what each one means, as data (docs/request-fields.md)."""
