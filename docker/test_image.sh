#!/bin/sh
# Builds the image and shows that it keeps its promises: docker/test_image.sh [-k]      (-k keeps image and work folder)
#
# With Docker or Podman the image is built and run by them. Where no engine runs, buildah does both with chroot isolation,
# on a base that debootstrap makes; that takes root and the packages buildah and debootstrap.
#
# BASE, BUILD_BASE           base images; default: the Dockerfile's, or with buildah Debians made here
# TORCH_INDEX, TORCH_HASH, PIP_*  passed on to the build; folders and files that PIP_FIND_LINKS and PIP_CERT name are mounted
# WORK                       folder for base and storage, about 25 GB (vfs keeps a copy a layer); default /var/tmp/slipway-image
set -eu
cd "$(dirname "$0")/.."

WORK=${WORK:-/var/tmp/slipway-image}
IMAGE=localhost/slipway-test
keep=false
test "${1-}" = -k && keep=true

say() { printf '%s\n' "== $*"; }
fail() { printf '%s\n' "test_image: $*" >&2; exit 1; }

if docker info >/dev/null 2>&1; then engine=docker
elif podman info >/dev/null 2>&1; then engine=podman
elif command -v buildah >/dev/null && command -v debootstrap >/dev/null; then engine=buildah
else fail "needs a running Docker or Podman, or the packages buildah and debootstrap (as root)"
fi
say "engine: $engine"

# The build sees what pip needs on this host.
set --
for name in TORCH_INDEX TORCH_HASH PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT; do
    eval "value=\${$name-}"
    test -n "$value" && set -- "$@" --build-arg "$name=$value"
done

# The image localhost/slipway-$1: a Debian with the packages $2.
debian() {
    if ! test -e "$WORK/$1.complete"; then
        say "making a Debian with $2"
        rm -rf "${WORK:?}/$1"
        debootstrap --variant=minbase --include="$2" bookworm "$WORK/$1" >"$WORK/debootstrap.log" 2>&1 ||
            fail "debootstrap failed, see $WORK/debootstrap.log"
        rm -rf "$WORK/$1"/var/cache/apt/archives/*.deb "$WORK/$1"/var/lib/apt/lists/*
        # Debian's slim images lack these.
        rm -rf "$WORK/$1"/usr/share/doc "$WORK/$1"/usr/share/man "$WORK/$1"/usr/share/locale "$WORK/$1"/usr/share/info
        touch "$WORK/$1.complete"
    fi
    $buildah images -q "localhost/slipway-$1" >/dev/null 2>&1 && return
    container=$($buildah from scratch)
    $buildah copy -q "$container" "$WORK/$1" / >/dev/null
    $buildah commit -q --rm "$container" "localhost/slipway-$1" >/dev/null
}

build_with_buildah() {
    mkdir -p "$WORK"
    test -n "${BASE-}" || { debian base python3,python3-venv,ca-certificates; BASE=localhost/slipway-base; }
    test -n "${BUILD_BASE-}" || { debian build python3,python3-venv,ca-certificates,g++; BUILD_BASE=localhost/slipway-build; }
    for path in "${PIP_FIND_LINKS-}" "${PIP_CERT-}"; do
        test -e "$path" && set -- "$@" --volume "$path:$path:ro"
    done
    $buildah bud --isolation chroot --format docker --layers --build-arg "BASE=$BASE" --build-arg "BUILD_BASE=$BUILD_BASE" "$@" -t "$IMAGE" .
}

buildah="buildah --root $WORK/storage --runroot $WORK/run --storage-driver vfs"
say "building"
case $engine in
buildah) build_with_buildah "$@" ;;
*) $engine build ${BASE:+--build-arg "BASE=$BASE"} ${BUILD_BASE:+--build-arg "BUILD_BASE=$BUILD_BASE"} "$@" -t "$IMAGE" . ;;
esac

# One container with a user that /etc/passwd does not know, on a read-only root where the engine can do that.
PORT=${PORT:-$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
URL=http://127.0.0.1:$PORT
MARK=slipway-image-$$
USER_ID=12345:0
manifest=$(mktemp)
log=$(mktemp)
chmod 644 "$manifest"
printf 'apiVersion: slipway/v2\nmodel: {source: {path: /opt/slipway/manifests/demo}, names: [mounted]}\n' >"$manifest"

clean() {
    status=$?
    trap - EXIT
    for pid in $(marked); do kill -9 "$pid" 2>/dev/null || true; done
    if test "$engine" != buildah; then $engine rm -f "$MARK" >/dev/null 2>&1 || true; fi
    if test "$engine" = buildah; then $buildah rm "$MARK" >/dev/null 2>&1 || true; fi
    test $status = 0 || { say "log of the container"; tail -n 40 "$log" >&2; }
    if ! $keep; then
        if test "$engine" = buildah; then $buildah rmi "$IMAGE" >/dev/null 2>&1 || true; else $engine rmi "$IMAGE" >/dev/null 2>&1 || true; fi
    fi
    rm -f "$manifest" "$log"
    exit $status
}

# Host process ids of everything the container runs, found by a variable that engines get too.
marked() {
    grep -lz "^LC_MARK=$MARK\$" /proc/[0-9]*/environ 2>/dev/null | while read -r path; do
        pid=${path#/proc/}
        pid=${pid%/environ}
        test "$pid" != $$ && grep -qaz . "/proc/$pid/cmdline" 2>/dev/null && echo "$pid"
    done
}
trap clean EXIT

# start ARGUMENT… as `docker run` would; `serving` is then what waits for its end.
start() {
    case $engine in
    buildah)
        $buildah from --name "$MARK" "$IMAGE" >/dev/null
        entry=$($buildah inspect --format '{{index .Docker.Config.Entrypoint 0}}' "$MARK")
        $buildah run --isolation chroot --user $USER_ID --env "LC_MARK=$MARK" --volume "$manifest:/manifest.yaml:ro" \
            "$MARK" -- "$entry" --host 127.0.0.1 --port "$PORT" "$@" >"$log" 2>&1 &
        serving=$!
        ;;
    *)
        $engine run --name "$MARK" --read-only --tmpfs /tmp --user $USER_ID --env "LC_MARK=$MARK" --volume "$manifest:/manifest.yaml:ro" \
            -p "127.0.0.1:$PORT:8000" "$IMAGE" "$@" >"$log" 2>&1 &
        serving=$!
        ;;
    esac
}

# inside COMMAND… runs COMMAND next to the service, with the image's environment.
inside() {
    case $engine in
    buildah) $buildah run --isolation chroot --user $USER_ID --volume "$manifest:/manifest.yaml:ro" "$MARK" -- "$@" ;;
    *) $engine exec "$MARK" "$@" ;;
    esac
}

# inside_python FILE ARGUMENT… runs a script of this folder by the image's Python.
inside_python() {
    script=$1
    shift
    inside python -P -c "$(cat "$script")" "$@"
}

process() { for pid in $(marked); do tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q -- "$1" && echo "$pid" && return; done; }

until_ready() {
    for _ in $(seq 600); do
        curl -fs -o /dev/null "$URL/ready" && return
        kill -0 "$serving" 2>/dev/null || fail "the container ended before it was ready"
        sleep 0.5
    done
    fail "not ready after 300 s"
}

chat() {
    curl -fsN "$URL/v1/chat/completions" -H 'Content-Type: application/json' \
        -d '{"model": "mounted", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "stream": true}'
}

answers() {
    reply=$(chat) || fail "the chat request failed"
    printf '%s\n' "$reply" | grep -q '^data: \[DONE\]' || fail "the stream did not end: $reply"
    text=$(printf '%s\n' "$reply" | sed -n 's/^data: {/{/p' | python3 -c '
import json, sys
chunks = [json.loads(line) for line in sys.stdin]
print("".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]), len(chunks))')
    say "answer and number of chunks: $text"
    test "${text##* }" -gt 2 || fail "the answer was not streamed"
}

say "starting as user $USER_ID with /manifest.yaml"
began=$(date +%s)
start
until_ready
say "ready after $(($(date +%s) - began)) s"
answers

launcher=$(process 'slipway serve')
test -n "$launcher" || fail "no slipway serve"
for pid in $(marked); do
    test "$(awk '/^Uid:/ {print $2}' "/proc/$pid/status")" != 0 || fail "process $pid runs as root: $(tr '\0' ' ' <"/proc/$pid/cmdline")"
done
say "no process runs as root"

inside slipway healthcheck || fail "healthcheck does not find the service healthy"
inside slipway check /opt/slipway/manifests/demo.yaml >/dev/null || fail "slipway check refuses the demo"
say "health check and other subcommands work"
inside cat /opt/slipway/sbom.spdx.json | grep -q '"pkg:pypi/torch@' || fail "the image has no bill of materials that names torch"
say "the bill of materials names the packages"

# Compiled kernels: their report by the product, a function that only they have, and their speed relative to torch.
kernels=$(inside slipway env --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["kernels"])')
case $kernels in
*base) say "compiled kernels for this CPU: $kernels" ;;
*) fail "slipway env names no compiled kernels: $kernels" ;;
esac
chosen=$(inside slipway plan /manifest.yaml --why hardware.kernels) || fail "slipway plan does not explain hardware.kernels"
say "slipway plan: $(printf '%s' "$chosen" | head -n 1)"
printf '%s' "$chosen" | grep -q "${kernels%%,*}" || fail "slipway plan does not choose ${kernels%%,*}: $chosen"
inside_python docker/measure.py /opt/slipway/manifests/demo --least 1.3 || fail "compiled kernels are not faster than torch"

inside python -c 'import ssl; paths = ssl.get_default_verify_paths(); raise SystemExit(not (paths.cafile or paths.capath))' ||
    fail "TLS finds no certificates of authorities"
# The NVIDIA runtime mounts the files of the host's driver. Kernels of the image are linked to a stub of libcuda.so.1 in a
# folder where no loader looks for it.
inside python -c 'import pathlib; raise SystemExit([*map(str, pathlib.Path("/usr").rglob("libcuda.so*"))] or None)' ||
    fail "the image has files of NVIDIA's driver"
contents=$(inside_python docker/contents.py) || fail "the contents of the image cannot be measured"
printf '%s\n' "$contents"
megabytes=$(printf '%s\n' "$contents" | sed -n 's/^contents: *\([0-9]*\)\..* in all$/\1/p')
if inside python -c 'from torch.version import cuda, hip; raise SystemExit(bool(cuda or hip))'; then most=700; else most=6000; fi
test "$megabytes" -lt $most || fail "the image has $megabytes MB, more than $most"

say "killing the engine"
kill -9 "$(process '-m engine')"
for _ in $(seq 200); do curl -fs -o /dev/null "$URL/ready" || break; sleep 0.05; done
curl -fs -o /dev/null "$URL/live" || fail "the gateway died with the engine"
until_ready
test "$(process 'slipway serve')" = "$launcher" || fail "the launcher changed"
answers
say "it came back, the launcher is the same"

say "SIGTERM"
case $engine in
buildah) kill -TERM "$launcher" ;;
*) $engine stop -t 30 "$MARK" >/dev/null ;;
esac
code=0
wait "$serving" || code=$?
test $code = 0 || fail "ended with code $code"
test -z "$(marked)" || fail "left behind: $(marked)"
say "ended with 0 and left nothing"

say "the image keeps its promises"
