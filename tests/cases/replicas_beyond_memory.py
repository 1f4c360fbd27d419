"""Impossible numbers of replicas are an error, without a panic or abort."""

from lib import *
import resource

for n in ("9223372036854775808", "100000000"):
    p = subprocess.run(
        [MA, "serve", "--replicas", n, "--port", "0", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
    )
    check("--replicas " + n, (p.returncode, p.stderr.strip()[-160:]), lambda g: g[0] in (1, 2) and "panick" not in p.stderr)
done()
