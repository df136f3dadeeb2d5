"""The dead-man of a systemd unit: a POSIX shell script under a transient unit on the unit's own machine.

It needs no Python there. It reads ``/run/opsctl/UNIT/lease`` (``TOKEN HUNDREDTHS-OF-UPTIME``), which ``renew``
overwrites in place: the file is never created again, so a lease that ended cannot come back to life. When it ends
the rollout is settled (``decide``), the trial drop-in moved to its committed name or removed, and the unit restarted.
It ends when the lease is gone or belongs to another token.
"""

from __future__ import annotations

FUNCTIONS = r"""
now() { read -r up rest </proc/uptime; whole=${up%.*}; part=${up#*.}; echo "$((whole * 100 + 1$part - 100))"; }
decide() { # DIR TOKEN WISH: the first wish stands
  printf %s "$3" >"$1/.wish.$$"; ln "$1/.wish.$$" "$1/decision-$2" 2>/dev/null; rm -f "$1/.wish.$$"; cat "$1/decision-$2"
}
commit() { # TRIAL COMMITTED
  [ -e "$1" ] || return 0
  mkdir -p "${2%/*}"; cat "$1" >"${2%/*}/.opsctl.$$"; sync "${2%/*}/.opsctl.$$"; mv -f "${2%/*}/.opsctl.$$" "$2"; sync "${2%/*}"; rm -f "$1"
}
"""

SCRIPT = (
    r"""#!/bin/sh
# deadman.sh DIR TOKEN UNIT TRIAL COMMITTED SYSTEMCTL-SCOPE [PAGE-COMMAND...]
dir=$1 token=$2 unit=$3 trial=$4 committed=$5 scope=$6; shift 6
"""
    + FUNCTIONS
    + r"""
held() { set -- $(cat "$dir/lease" 2>/dev/null); until=${2:-0}; [ "${1:-}" = "$token" ]; }
ended() { [ "$(now)" -ge "$until" ]; }
while held; do
  if ! ended; then sleep 0.2; continue; fi
  sleep 0.1; held || exit 0
  ended || continue  # the first look met a renewal half written
  mv "$dir/lease" "$dir/lease.ended" || exit 0
  if [ "$(decide "$dir" "$token" revert)" = commit ]; then
    commit "$trial" "$committed"; systemctl "$scope" daemon-reload; exit 0
  fi
  rm -f "$trial"; echo "$token" >"$dir/reverted"
  echo "opsctl: rollout $token was not heard of in time: $unit reverted by the dead-man"
  systemctl "$scope" daemon-reload
  systemctl "$scope" stop "$unit"
  systemctl "$scope" reset-failed "$unit" 2>/dev/null
  systemctl "$scope" --no-block start "$unit" || systemctl "$scope" --no-block restart "$unit"
  [ $# -eq 0 ] || "$@"
  exit 0
done
"""
)
