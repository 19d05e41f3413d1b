#!/usr/bin/env bash
# A user without a clone: builds the wheel, installs it into an empty environment, and starts a project there.
# The environment sees the packages of .venv, so it takes seconds.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
day=$(mktemp -d)
trap 'rm -rf "$day"' EXIT
unset PYTHONPATH DATA_DIR
cd "$here"
.venv/bin/python -m hatchling build --target wheel --directory "$day/dist" >/dev/null
.venv/bin/uv venv --quiet --python .venv/bin/python "$day/env"
python=$day/env/bin/python
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
echo "import site; site.addsitedir('$(.venv/bin/python -c "$purelib")')" >"$("$python" -c "$purelib")/packages.pth"
.venv/bin/uv pip install --quiet --python "$python" --no-deps "$day"/dist/*.whl

cd "$day"
export PATH=$day/env/bin:$PATH
case $(python -c 'import gcfed; print(gcfed.__file__)') in
"$day"/env/*) ;;
*) echo "wheel: the clone was imported"; exit 1 ;;
esac
gcfed-new flowers
cd flowers
python -m pytest -q -p no:cacheprovider
gcfed-train --config-dir conf experiment=first rounds=2 extras.figures=false
gcfed-report
test -s logs/report/index.html
echo "wheel: done in $SECONDS s"
