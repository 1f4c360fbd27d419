#!/bin/sh
# After the package was installed or updated. May run any number of times.
set -eu
# Debian calls it with other words where an installation is undone.
case "${1:-}" in
    abort-*) exit 0 ;;
esac
if ! getent passwd metal-attention >/dev/null; then
    useradd --system --user-group --home-dir /var/lib/metal-attention --no-create-home --shell /usr/sbin/nologin metal-attention
fi
# The groups that may use GPUs.
for group in render video; do
    if getent group "$group" >/dev/null; then
        usermod --append --groups "$group" metal-attention
    fi
done
install -d -m 0750 -o metal-attention -g metal-attention /var/lib/metal-attention /var/lib/metal-attention/models
# Without systemd, as in a container, there is nothing to tell.
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart metal-attention.service
fi
# The first installation: Debian names the version before, Fedora counts.
if [ "${1:-}" = 1 ] || { [ "${1:-}" = configure ] && [ -z "${2:-}" ]; }; then
    echo "metal-attention: to start the server, now and at each start of the system: systemctl enable --now metal-attention"
fi
