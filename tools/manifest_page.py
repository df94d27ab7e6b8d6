"""Writes docs/manifest.md and docs/manifest.schema.json from the schema in appliance/manifest.py."""

from pathlib import Path

from appliance.declare.schema_file import manifest_page, schema_text

DOCS = Path(__file__).resolve().parent.parent / "docs"

if __name__ == "__main__":
    (DOCS / "manifest.md").write_text(manifest_page())
    (DOCS / "manifest.schema.json").write_text(schema_text())
