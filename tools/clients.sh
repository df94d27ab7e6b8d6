#!/usr/bin/env bash
# Runs tests/clients in a separate environment against a new demo service, and writes docs/clients.md.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv-clients/bin
[ -x "$bin/python" ] || python3 -m venv .venv-clients
"$bin/python" requirements/install.py runtime --quiet
"$bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/clients.txt
folder=$(mktemp -d)
serve() { # NAME, further options
	local name=$1
	shift
	.venv/bin/slipway serve manifests/demo.yaml --host 127.0.0.1 --port 0 "$@" >"$folder/$name" 2>&1 &
	services+=($!)
}
url_of() { # NAME; waits until the service is ready
	until grep -q '^ready ' "$folder/$1"; do
		kill -0 "${services[@]}" || { cat "$folder/$1" >&2; return 1; }
		sleep 0.2
	done
	sed -n 's/^ready *\(http[^ ]*\) .*/\1/p' "$folder/$1" | head -1
}
services=()
trap 'kill "${services[@]}"; wait "${services[@]}" || true; rm -rf "$folder"' EXIT
serve whole
serve brief --limits.max-output-tokens 4 --limits.max-choices 4
url=$(url_of whole) brief=$(url_of brief)
status=0
"$bin/python" -m pytest -q -c /dev/null --rootdir tests/clients --confcutdir tests/clients -p no:cacheprovider \
	--url "$url" --brief-url "$brief" --table "$folder/table.json" tests/clients || status=$?
.venv/bin/python tools/clients_page.py "$folder/table.json"
exit $status
