#!/usr/bin/env bash
# Watch a visit for some seconds, then bring its logs and the newest files of a folder to $OUT.
#   bash poll.sh SECONDS [coder|codec|lm|tokens|takes FIRST LAST]
# A folder comes as one archive, its pieces FIRST to LAST of 15 MiB (cat NAME.tar.* | tar x);
# piece 0 packs it anew. Ends early when the visit has ended.
set -u
work=${VOICE_WORK:-/tmp/voice}
seconds=${1:-60}
[ $# -gt 0 ] && shift
status() { cat "$work/out/status" 2>/dev/null || echo "no status"; }
ended() {
    case $(status) in done | failed) return 0 ;; esac
    ! kill -0 "$(cat "$work/pid" 2>/dev/null)" 2>/dev/null
}
until=$(($(date +%s) + seconds))
shown=0
while [ "$(date +%s)" -lt "$until" ] && ! ended; do
    sleep 1
    if [ "$(($(date +%s) - shown))" -ge 30 ]; then
        shown=$(date +%s)
        echo "== $(date +%T) $(status)"
        tail -qn 1 "$work"/out/logs/*.log 2>/dev/null
    fi
done
out=${OUT:-$work/home}
mkdir -p "$out"
(
    for log in "$work"/out/visit.log "$work"/out/logs/*.log; do
        echo "##### $log"
        cat "$log"
    done
    nvidia-smi 2>/dev/null
    du -sh "$work/out/takes" 2>/dev/null
) >"$out/logs.txt" 2>&1
tail -c 4000000 "$out/logs.txt" >"$out/logs.tmp" && mv "$out/logs.tmp" "$out/logs.txt"
pieces() { # some of those of a folder's archive
    packed=$work/out/packed/$1
    if [ "$2" = 0 ]; then
        rm -rf "$packed"
        mkdir -p "$packed"
        (cd "$work/out/$1" && find . -type f ! -name '*tmp*' | sort | tar cf - -T -) |
            split -b "${VOICE_PIECE:-15728640}" -d -a 3 - "$packed/$1.tar."
    fi
    echo "$1: $(find "$packed" -type f | wc -l) pieces"
    for number in $(seq "$2" "$3"); do
        piece=$packed/$1.tar.$(printf %03d "$number")
        if [ -e "$piece" ]; then cp "$piece" "$out/"; fi
    done
}
if [ $# -gt 0 ]; then pieces "$1" "${2:-0}" "${3:-3}"; fi
echo "== losses"
for log in "$work"/out/logs/{coder,decoder,lm,voices}.log; do
    [ -e "$log" ] && grep -h 'held out:' "$log" | tail -n 12
    [ -e "$log" ] && tail -n 4 "$log"
done
[ "$(status)" = synthesis ] && tail -qn 2 "$work"/out/logs/{studio,planner,tokenise}*.log 2>/dev/null
ls -la "$out"
echo "status: $(status)"
if ended && [ "$(status)" != done ]; then
    echo "THE VISIT HAS FAILED"
    tail -n 60 "$work/out/visit.log"
    exit 1
fi
exit 0
