#!/bin/sh
# Makes an empty environment with pip in it, for `make setup`:
#
#     sh setup.sh PYTHON VENV
#
# PYTHON is used if pyproject.toml allows its version. Where it is another version, or has no `venv` (Debian and Ubuntu
# leave it out), uv makes the environment, with PYTHON or with a Python that it finds or downloads. Nothing is downloaded
# before this is decided. Exit code 2: no Python that fits, and the last line says what to install.
set -eu
python=$1 venv=$2
here=$(dirname "$0")
bounds=$(sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)"$/\1 \2/p' "$here/pyproject.toml")
low=${bounds% *} high=$((${bounds#* } - 1))

give_up() {
    echo "setup: $1. Install Python 3.$low to 3.$high with venv (Debian, Ubuntu: apt-get install python3-venv)," \
        "then run: make setup PYTHON=python3.$high" >&2
    exit 2
}

minor() { "$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null || true; }

# What is wrong with PYTHON; nothing if it can make the environment.
lacks() {
    command -v "$python" >/dev/null || { echo "there is no $python"; return; }
    "$python" - "$low" "$high" <<'PY' || echo "$python does not run"
import sys
low, high = map(int, sys.argv[1:])
if sys.version_info[0] != 3 or not low <= sys.version_info[1] <= high:
    print("it is Python " + ".".join(map(str, sys.version_info[:3])))
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("it has no venv")
PY
}

# uv from the path, by pip, or from the package index by Python alone; prints where it is.
bring_uv() {
    if command -v uv; then return; fi
    folder=build/uv version=$(sed -n 's/^uv==//p' "$here/constraints.txt")
    mkdir -p "$folder/bin"
    if "$python" -m pip install --quiet --upgrade --target "$folder" "uv==$version"; then
        echo "$folder/bin/uv"
        return
    fi
    "$python" - "$version" "$folder/bin/uv" <<'PY' || return 1
import hashlib, html, io, os, platform, re, sys, urllib.parse, urllib.request, zipfile
version, target = sys.argv[1:]
index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/uv/"
page = urllib.request.urlopen(index, timeout=60).read().decode()
wheel = "uv-%s-py3-none-manylinux[^\"]*_%s[^\"]*[.]whl#sha256=([0-9a-f]{64})" % (re.escape(version), platform.machine())
found = re.search('href="([^"]*%s)"' % wheel, html.unescape(page))
address, sha256 = urllib.parse.urljoin(index, found.group(1)), found.group(2)
data = urllib.request.urlopen(address, timeout=300).read()
assert hashlib.sha256(data).hexdigest() == sha256, "uv's wheel is damaged"
with open(target, "wb") as file:
    file.write(zipfile.ZipFile(io.BytesIO(data)).read("uv-%s.data/scripts/uv" % version))
os.chmod(target, 0o755)
PY
    echo "$folder/bin/uv"
}

# A working environment is kept. Made over by another 3.N.M (a pyenv that moved on), it would have parts of both.
made_by=$(minor "$venv/bin/python")
if [ -n "$made_by" ] && [ -x "$venv/bin/pip" ] && [ "$made_by" = "$(minor "$python")" ]; then
    exit 0
fi
wrong=$(lacks)
if [ -z "$wrong" ]; then
    exec "$python" -m venv --clear "$venv"
fi
case $wrong in
*"no venv") wanted=$python with=$python ;;
*) wanted=">=3.$low,<3.$((high + 1))" with="a Python from 3.$low to 3.$high that it finds here or downloads" ;;
esac
mkdir -p build
echo "setup: $python does not fit: $wrong. uv (20 MB) makes the environment instead, with $with"
uv=$(bring_uv 2>build/setup-uv.log) || give_up "$wrong, and uv cannot be downloaded ($(tail -n 1 build/setup-uv.log | cut -c 1-200))"
"$uv" venv --quiet --seed --allow-existing --python "$wanted" "$venv" 2>build/setup-uv.log ||
    give_up "$wrong, and uv brings no other ($(grep -m 1 -i error build/setup-uv.log | cut -c 1-200))"
