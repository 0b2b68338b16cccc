#!/usr/bin/env bash
# Copy this part of a bundle to $VOICE_WORK/bundle (/tmp/voice/bundle), where a visit finds it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=${VOICE_WORK:-/tmp/voice}
mkdir -p "$work/bundle"
cp -r "$here/." "$work/bundle/"
