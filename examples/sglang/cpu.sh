#!/usr/bin/env bash
# SGLang on this host's CPU: a prefill server, a decode server, and Baton's router on port 8000. Ctrl-C ends all.
# From the root of the repository, in an environment that the first run makes and later ones use:
#   python3 tools/install_sglang.py examples/sglang/cpu.sh [MODEL]
# Then, when the router has said where it listens:
#   curl http://127.0.0.1:8000/v1/completions -d '{"model": "demo", "prompt": "def main(", "max_tokens": 32, "temperature": 0}'
# `tests/sglang/support` is a stand-in for SGLang's kernels, which PyPI has for CUDA only.
set -euo pipefail
MODEL=${1:-models/baton-demo-llama}
KEYS=${KEYS:-$PWD/keys}
# The plug-in's entry point, which an installed Baton brings with it.
ENTRY=$(mktemp -d)
mkdir "$ENTRY/baton_serve-0.dist-info"
printf '[sglang.srt.plugins]\nbaton = baton.sglang:register\n' > "$ENTRY/baton_serve-0.dist-info/entry_points.txt"
printf 'Metadata-Version: 2.1\nName: baton-serve\nVersion: 0\n' > "$ENTRY/baton_serve-0.dist-info/METADATA"
# SGLang wants an address of this host; without this variable it looks for a route to the internet, and ends if there is none.
export SGLANG_HOST_IP=127.0.0.1 SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$ENTRY:tests/sglang/support:src

python -m baton.cli keys --output "$KEYS" --engines P,D
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm -r "$ENTRY"' EXIT

engine() { # name port flags...
    BATON_SGLANG_CONFIG='{"engine_id": "'"$1"'", "keys": "'"$KEYS"'"}' \
        sglang serve --model-path "$MODEL" --served-model-name demo --port "$2" --device cpu \
        --attention-backend torch_native --dtype float32 --disable-overlap-schedule \
        --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled \
        --skip-server-warmup --max-total-tokens 16384 --disaggregation-transfer-backend baton "${@:3}" &
}
engine P 8101 --disaggregation-mode prefill
engine D 8102 --disaggregation-mode decode --disaggregation-decode-retraction-backup cpu_tensor
for port in 8101 8102; do
    until curl -sf "http://127.0.0.1:$port/server_info" > /dev/null; do
        [ "$(jobs -rp | wc -l)" = 2 ] # a server that did not start has said why
        sleep 1
    done
done
python -m baton.cli router --engine sglang --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 \
    --keys "$KEYS" --tokenizer "$MODEL" --port 8000
