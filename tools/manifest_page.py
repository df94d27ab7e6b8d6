"""Write docs/manifest.md and docs/manifest.schema.json from the keys in appliance/config/sections."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.config.schema_file import manifest_page, schema_text  # noqa: E402
from tools.pages import write_pages  # noqa: E402

if __name__ == "__main__":
    write_pages(__doc__, {"manifest.md": manifest_page, "manifest.schema.json": schema_text})
