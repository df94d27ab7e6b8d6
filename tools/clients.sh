#!/usr/bin/env bash
# Runs tests/clients against a demo service of its own, in an environment of its own, and writes docs/clients.md.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv-clients/bin
[ -x "$bin/python" ] || python3 -m venv .venv-clients
"$bin/pip" install --quiet --disable-pip-version-check -r requirements/clients.txt
folder=$(mktemp -d)
.venv/bin/slipway serve manifests/demo.yaml --host 127.0.0.1 --port 0 >"$folder/log" 2>&1 &
service=$!
trap 'kill $service; wait $service || true; rm -rf "$folder"' EXIT
until url=$(sed -n 's/^ready *\(http[^ ]*\) .*/\1/p' "$folder/log" | head -1) && [ -n "$url" ]; do
	kill -0 $service || { cat "$folder/log" >&2; exit 1; }
	sleep 0.2
done
status=0
"$bin/python" -m pytest -q -c /dev/null --rootdir tests/clients --confcutdir tests/clients -p no:cacheprovider \
	--url "$url" --table "$folder/table.json" tests/clients || status=$?
.venv/bin/python tools/clients_page.py "$folder/table.json"
exit $status
