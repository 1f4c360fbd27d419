"""A weight beyond the range of the target type is an error or stored in another type, never silently infinite."""

from lib import *
import numpy as np

cli("synth", "custom", "--n-embd", "256", "--n-layer", "1", "--type", "F32", "-o", TMP + "w.gguf")
g = raw_gguf.read(TMP + "w.gguf")
name = "blk.0.attn_q.weight"
for value, recipes in [
    (65000.0, ["F16", "Q8_0", "Q4_K_M"]),
    (70000.0, ["F16"]),
    (1e7, ["Q8_0", "Q4_0", "Q4_K_M", "IQ4_NL"]),
    (float("inf"), ["Q8_0"]),
]:
    h = raw_gguf.cp(g)
    d = np.frombuffer(h.data[name], "<f4").copy()
    d[5] = value
    h.data[name] = d.tobytes()
    raw_gguf.write(h, TMP + "x.gguf")
    for recipe in recipes:
        rc, _, err = cli("quantize", TMP + "x.gguf", TMP + "y.gguf", recipe, "-t", "1")
        if rc == 0:
            rc2, _, err2 = cli("quantize", TMP + "y.gguf", TMP + "z.gguf", "F32", "-t", "1")
        else:
            rc2, err2 = 0, ""
        check(
            f"{value:g} as {recipe}: rc {rc}; the result is " + ("not written" if rc else "finite" if rc2 == 0 else err2.strip()),
            rc2,
            0,
        )
done()
