#!/usr/bin/env bash
# Start a visit on this machine in the background, once lay.sh of both parts of a bundle has run.
#   bash /tmp/voice/bundle/start.sh [MINUTES [arguments of training.lent.visit]]
set -eu
work=${VOICE_WORK:-/tmp/voice}
minutes=${1:-20}
[ $# -gt 0 ] && shift
if [ -e "$work/pid" ] && kill -0 "$(cat "$work/pid")" 2>/dev/null; then
    echo "a visit runs already (process $(cat "$work/pid")): poll it"
    exit 1
fi
rm -rf "$work/out"
mkdir -p "$work/out"
python=${VOICE_PYTHON:-python3}
export PYTHONPATH="$work/bundle:$work/site${PYTHONPATH:+:$PYTHONPATH}"
if ls "$work"/bundle/wheels/*.whl >/dev/null 2>&1 && ! "$python" -c 'import soxr' 2>/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$work/site" "$work"/bundle/wheels/*.whl
fi
"$python" - <<'PY'
import numpy, safetensors, soxr, torch, torchaudio, transformers
print("torch", torch.__version__, "transformers", transformers.__version__, "numpy", numpy.__version__,
      [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], flush=True)
PY
cd "$work/bundle"
setsid nohup "$python" -u -m training.lent.visit --teacher teacher --package package \
    --phonemes phonemes --out "$work/out" --minutes "$minutes" "$@" \
    >"$work/out/visit.log" 2>&1 </dev/null &
echo $! >"$work/pid"
for _ in $(seq 1 "${VOICE_WATCH:-25}"); do
    sleep 1
    kill -0 "$(cat "$work/pid")" 2>/dev/null || break
done
tail -n 5 "$work/out/visit.log" "$work"/out/logs/*.log 2>/dev/null || true
if ! kill -0 "$(cat "$work/pid")" 2>/dev/null && [ "$(cat "$work/out/status" 2>/dev/null)" != done ]; then
    echo "the visit has ended early"
    exit 1
fi
