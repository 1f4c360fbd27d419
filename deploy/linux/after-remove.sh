#!/bin/sh
# After the package was removed. Models stay, but for `apt purge`, which removes them and the user.
set -eu
case "${1:-}" in
    remove | 0)
        if [ -d /run/systemd/system ]; then
            systemctl daemon-reload
        fi
        ;;
    purge)
        rm -rf /var/lib/metal-attention /var/cache/metal-attention
        if getent passwd metal-attention >/dev/null; then
            userdel metal-attention
        fi
        ;;
esac
