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

gcfed-table | grep -q "^gcfed_table5 "
cat >my.yaml <<'END'
# The own method after a search
overrides: [rounds=2, client.epochs=1, data.limit_train=200, participation.num_clients=8, extras.figures=false, trainer.devices=1]
rows: [{label: Mine, overrides: [algorithm=fedexp_last, gc=none]}]
columns: [{label: α 0.1, overrides: [partition.alpha=0.1]}]
seeds: [1, 2]
search: {metric: "last:val/acc", n_trials: 1, overrides: [data.validation=0.1, seed=9], params: {client.optimizer.lr: "interval(0.01, 0.1)"}}
END
gcfed-table my.yaml --config-dir conf >table.txt
grep "2 to start" table.txt
grep -E "^\| Mine .* to " table.txt  # with its interval
sed 's/^seeds:/sedes:/' my.yaml >wrong.yaml
! gcfed-table wrong.yaml 2>wrong.txt
grep "the key sedes is unknown: did you mean seeds?" wrong.txt
echo "wheel: done in $SECONDS s"
