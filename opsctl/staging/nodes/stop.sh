#!/bin/bash
# stop.sh NAME: an orderly halt; after 10 s SIGKILL to that node's init, which takes the rest with it.
set -uo pipefail

NAME=${1:?}
DIR=${NODES_DIR:-${TMPDIR:-/tmp}/lastbatch-nodes}/$NAME
PID=$(cat "$DIR/pid" 2>/dev/null)
LAUNCHER=$(cat "$DIR/launcher.pid" 2>/dev/null)

if [[ -n $PID && -d /proc/$PID ]] && grep -q node.target "/proc/$PID/cmdline"; then
  kill -s RTMIN+3 "$PID"
  for ((i = 0; i < 200; i++)); do
    [[ -d /proc/$PID ]] || break
    sleep 0.05
  done
  [[ ! -d /proc/$PID ]] || kill -KILL "$PID"
fi
for ((i = 0; i < 40; i++)); do
  [[ -n $LAUNCHER && -d /proc/$LAUNCHER ]] || break
  sleep 0.05
done
CGROUP=$(cat "$DIR/cgroup" 2>/dev/null)
if [[ -n $CGROUP && -d $CGROUP ]]; then
  echo 1 >"$CGROUP/cgroup.kill" 2>/dev/null
  for ((i = 0; i < 40; i++)); do
    find "$CGROUP" -depth -type d -exec rmdir {} + 2>/dev/null
    [[ -d $CGROUP ]] || break
    sleep 0.05
  done
fi
rm -rf --one-file-system "$DIR"
[[ -n ${NODES_KEEP:-} ]] || rm -rf "/dev/shm/lastbatch-nodes/$NAME-$(md5sum <<<"$DIR" | head -c 8)"
rmdir /dev/shm/lastbatch-nodes 2>/dev/null || true
