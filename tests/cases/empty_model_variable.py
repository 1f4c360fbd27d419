"""An empty METAL_ATTENTION_MODEL, which docker compose sets for a variable without a value, counts as not set."""

from lib import *

for value in ["", " "]:
    rc, out, err = cli(
        "run", "-p", "Once upon a time", "-n", "2", "--temp", "0", "--device", "cpu", env={"METAL_ATTENTION_MODEL": value}
    )
    check(f"{value!r}: " + err.split("\n")[0], rc, 0 if not value else lambda rc: rc in (0, 3))
done()
