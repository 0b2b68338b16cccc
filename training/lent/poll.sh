#!/usr/bin/env bash
# Watch a trial for some seconds, then bring its logs and newest weights to $OUT.
#   bash poll.sh SECONDS [DESIGN ...]
#   bash poll.sh SECONDS lm|tokens FIRST LAST
# Without a design: all designs in 8 bits. With one: its float16 weights and its discriminators, in
# pieces of 15 MiB (cat NAME.* >NAME). lm and tokens: a folder as one archive, its pieces FIRST to
# LAST (cat NAME.tar.* | tar x); piece 0 packs it anew. Ends early when the trial has ended.
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
    for log in "$work"/out/trial.log "$work"/out/logs/*.log; do
        echo "##### $log"
        cat "$log"
    done
    nvidia-smi 2>/dev/null
    du -sh "$work/out/takes" 2>/dev/null
) >"$out/logs.txt" 2>&1
tail -c 4000000 "$out/logs.txt" >"$out/logs.tmp" && mv "$out/logs.tmp" "$out/logs.txt"
pack() { # one file, in pieces when it is large
    if [ "$(stat -c %s "$1")" -gt 15728640 ]; then
        split -b 15728640 -d "$1" "$out/$(basename "$1")."
    else
        cp "$1" "$out/"
    fi
}
pieces() { # some of those of a folder's archive
    packed=$work/out/packed/$1
    if [ "$2" = 0 ]; then
        rm -rf "$packed"
        mkdir -p "$packed"
        (cd "$work/out/$1" && find . -type f ! -name '*tmp*' | sort | tar cf - -T -) |
            split -b 15728640 -d - "$packed/$1.tar."
    fi
    echo "$1: $(find "$packed" -type f | wc -l) pieces"
    for number in $(seq "$2" "$3"); do
        piece=$packed/$1.tar.$(printf %02d "$number")
        if [ -e "$piece" ]; then cp "$piece" "$out/"; fi
    done
}
codec=$work/out/codec
if [ $# -eq 0 ]; then
    for file in "$codec"/*.8bit.safetensors; do [ -e "$file" ] && pack "$file"; done
elif [ "$1" = lm ] || [ "$1" = tokens ]; then
    pieces "$1" "${2:-0}" "${3:-3}"
else
    for design in "$@"; do
        for file in "$codec/$design.safetensors" "$codec/$design.judges.safetensors"; do
            if [ -e "$file" ]; then pack "$file"; else echo "$file is not there"; fi
        done
    done
fi
cat "$codec"/*.json 2>/dev/null | tr -d '\n ' >"$out/designs.txt"
echo "== losses"
for log in "$work"/out/logs/train_*.log "$work"/out/logs/lm.log; do
    [ -e "$log" ] && grep -h 'held out:' "$log" | tail -n 12
    [ -e "$log" ] && tail -n 4 "$log"
done
[ "$(status)" = synthesis ] && tail -qn 2 "$work"/out/logs/{studio,tokenise}*.log 2>/dev/null
ls -la "$out"
echo "status: $(status)"
if ended && [ "$(status)" != done ]; then
    echo "THE TRIAL HAS FAILED"
    tail -n 60 "$work/out/trial.log"
    exit 1
fi
exit 0
