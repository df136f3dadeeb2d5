#!/bin/bash
# start.sh NAME [NETNS]: boot a real systemd and journald as PID 1 of namespaces of their own, on an overlay of /.
#
# Prints one line to eval: NODE_PID=... NODE_EXEC="nsenter ...". Use NODE_EXEC only when this script succeeded: with
# an empty one a command would run on the host. Without NETNS the node has a loopback interface and nothing else.
#
#   NODES_DIR    where nodes keep their state     (default: $TMPDIR/lastbatch-nodes)
#   NODES_SHARE  folders bound into the node, writable; everything else it writes is lost when it stops
#   NODES_HOOK   run as `bash HOOK ROOT NAME` before the first boot
#   NODES_KEEP   not empty: keep what the node wrote, so that the next start is a reboot of the same machine
#
# Needs root, systemd and util-linux. No memory or pids controller, so MemoryMax= does nothing in a node.
set -euo pipefail

NAME=$1 NETNS=${2:-}
NODES_DIR=${NODES_DIR:-${TMPDIR:-/tmp}/lastbatch-nodes}
DIR=$NODES_DIR/$NAME
ID=$NAME-$(md5sum <<<"$DIR" | head -c 8) # on the whole machine: others may have a node of this name in another folder
export ID NODES_SHARE=${NODES_SHARE:-} NODES_HOOK=${NODES_HOOK:-} NODES_KEEP=${NODES_KEEP:-}

if [[ -s $DIR/pid && -d /proc/$(<"$DIR/pid") ]]; then
  echo "$NAME is up already" >&2
  exit 3
fi
mkdir -p "$DIR/mnt"
rm -f "$DIR"/{pid,launcher.pid}

# A cgroup of its own. On a host with cgroup v1 the unified hierarchy is mounted beside the nodes.
for CGROUP in /sys/fs/cgroup /sys/fs/cgroup/unified "$NODES_DIR/cgroup"; do
  [[ $(stat -fc %T "$CGROUP" 2>/dev/null) != cgroup2fs ]] || break
done
if [[ $CGROUP == "$NODES_DIR/cgroup" ]] && ! mountpoint -q "$CGROUP"; then
  mkdir -p "$CGROUP"
  mount -t cgroup2 cgroup2 "$CGROUP"
fi
CGROUP=$CGROUP/lastbatch-node-$ID
mkdir -p "$CGROUP"
echo "$CGROUP" >"$DIR/cgroup"

cat >"$DIR/init.sh" <<'INIT'
set -euo pipefail
DIR=$1 NAME=$2 ROOT=$1/mnt/root
read -r HOST_PID _ </proc/self/stat
echo "$HOST_PID" >"$DIR/pid"
hostname "$NAME"

mount -t tmpfs -o mode=755 node "$DIR/mnt"
UPPER=$DIR/mnt # the upper folder must not lie on the file system of the lower one
[[ -z $NODES_KEEP ]] || UPPER=/dev/shm/lastbatch-nodes/$ID
mkdir -p "$UPPER"/{upper,work} "$ROOT"
mount -t overlay -o "lowerdir=/,upperdir=$UPPER/upper,workdir=$UPPER/work" overlay "$ROOT"

mount -t proc proc "$ROOT/proc"
cat /proc/sys/kernel/random/uuid >"$DIR/boot_id"
mount --bind "$DIR/boot_id" "$ROOT/proc/sys/kernel/random/boot_id"
mount --rbind "$ROOT/proc/sys" "$ROOT/proc/sys"
mount -o remount,bind,ro "$ROOT/proc/sys" # the host's knobs are out of reach
mount -t sysfs -o ro sysfs "$ROOT/sys"
mount -t cgroup2 cgroup2 "$ROOT/sys/fs/cgroup"

mount -t tmpfs -o mode=755 tmpfs "$ROOT/dev"
mkdir -p "$ROOT"/dev/{pts,shm,mqueue}
while read -r DEVICE MAJOR MINOR; do mknod -m 666 "$ROOT/dev/$DEVICE" c "$MAJOR" "$MINOR"; done <<'DEVICES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
DEVICES
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$ROOT/dev/pts"
ln -s pts/ptmx "$ROOT/dev/ptmx"
ln -s /proc/self/fd "$ROOT/dev/fd"
ln -s fd/0 "$ROOT/dev/stdin"
ln -s fd/1 "$ROOT/dev/stdout"
ln -s fd/2 "$ROOT/dev/stderr"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
: >"$DIR/console.log"
: >"$ROOT/dev/console"
mount --bind "$DIR/console.log" "$ROOT/dev/console"
mount -t tmpfs -o mode=755 tmpfs "$ROOT/run"
mkdir -p "$ROOT"/run/{lock,sshd}
for SHARED in $NODES_SHARE; do
  mkdir -p "$ROOT$SHARED"
  mount --bind "$SHARED" "$ROOT$SHARED"
done

if [[ ! -e $ROOT/.node-made ]]; then
  : >"$ROOT/.node-made"
  UNITS=$ROOT/etc/systemd/system
  tr -d - </proc/sys/kernel/random/uuid >"$ROOT/etc/machine-id"
  echo "$NAME" >"$ROOT/etc/hostname"
  echo "127.0.1.1 $NAME" >>"$ROOT/etc/hosts"
  rm -rf "$UNITS" "$ROOT/var/log/journal"
  mkdir -p "$UNITS" "$ROOT"/etc/systemd/{journald,system}.conf.d "$ROOT/var/log/journal/$(<"$ROOT/etc/machine-id")"
  MASKED="systemd-udevd.service systemd-logind.service systemd-remount-fs.service
    systemd-tmpfiles-clean.timer systemd-initctl.socket systemd-journald-audit.socket"
  for UNIT in $(ls "$ROOT/lib/systemd/system/sysinit.target.wants" | grep -v ^systemd-journal) $MASKED; do
    ln -sf /dev/null "$UNITS/$UNIT"
  done
  cat >"$UNITS/node.target" <<'TARGET'
[Unit]
Requires=basic.target
After=basic.target
AllowIsolate=yes
TARGET
  cat >"$ROOT/etc/systemd/journald.conf.d/node.conf" <<'JOURNAL'
[Journal]
Storage=persistent
ReadKMsg=no
Audit=no
RateLimitIntervalSec=0
SyncIntervalSec=1s
SystemMaxUse=64M
JOURNAL
  cat >"$ROOT/etc/systemd/system.conf.d/node.conf" <<'MANAGER'
[Manager]
LogTarget=journal
ShowStatus=no
DefaultTimeoutStopSec=15s
MANAGER
  [[ -z $NODES_HOOK ]] || bash "$NODES_HOOK" "$ROOT" "$NAME"
fi

cd "$ROOT"
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM=dumb container=test-node \
  setpriv --bounding-set=-sys_module,-sys_rawio,-sys_time,-syslog \
  /lib/systemd/systemd --system --unit=node.target </dev/null >/dev/console 2>&1
INIT

NET=(--net) ENTER=()
if [[ -n $NETNS ]]; then
  NET=()
  ENTER=(nsenter "--net=/run/netns/$NETNS" --)
fi
(
  echo "$BASHPID" >"$CGROUP/cgroup.procs"
  exec setsid "${ENTER[@]}" unshare --fork --kill-child --pid --mount --uts --ipc --cgroup "${NET[@]}" \
    --propagation private bash "$DIR/init.sh" "$DIR" "$NAME" </dev/null >"$DIR/launch.log" 2>&1
) &
echo $! >"$DIR/launcher.pid"

STATE=
for ((i = 0; i < 400; i++)); do
  if [[ -s $DIR/pid ]]; then
    PID=$(<"$DIR/pid")
    EXEC="nsenter -t $PID -m -u -i -n -p --"
    STATE=$($EXEC systemctl is-system-running 2>/dev/null || :)
    [[ $STATE != running && $STATE != degraded ]] || break
  fi
  kill -0 "$(<"$DIR/launcher.pid")" 2>/dev/null || break
  sleep 0.05
done
if [[ $STATE != running && $STATE != degraded ]]; then
  echo "$NAME did not boot: ${STATE:-no answer}" >&2
  cat "$DIR"/*.log >&2
  exit 1
fi
echo "NODE_PID=$PID NODE_EXEC=\"$EXEC\""
