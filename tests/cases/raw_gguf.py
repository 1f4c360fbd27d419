"""Reads and writes GGUF files without checks, in order to write invalid ones. `g.kv` has the metadata as [key, type, value], `g.t` the
tensors as [name, shape, type, offset], `g.data` their bytes by name."""

import struct, copy

T = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class G:
    pass


def read(path):
    b = open(path, "rb").read()
    o = [0]

    def u(f):
        s = struct.calcsize("<" + f)
        v = struct.unpack_from("<" + f, b, o[0])[0]
        o[0] += s
        return v

    def s():
        n = u("Q")
        v = b[o[0] : o[0] + n]
        o[0] += n
        return v

    def val(t):
        if t == 8:
            return s()
        if t == 9:
            et = u("I")
            n = u("Q")
            return (et, [val(et) for _ in range(n)])
        return u(T[t])

    g = G()
    assert b[:4] == b"GGUF"
    o[0] = 4
    g.version = u("I")
    nt = u("Q")
    nk = u("Q")
    g.kv = []
    for _ in range(nk):
        k = s()
        t = u("I")
        g.kv.append([k.decode(), t, val(t)])
    g.t = []
    for _ in range(nt):
        n = s().decode()
        d = u("I")
        dims = [u("Q") for _ in range(d)]
        ty = u("I")
        off = u("Q")
        g.t.append([n, dims, ty, off])
    g.al = next((v for k, t, v in g.kv if k == "general.alignment"), 32)
    base = (o[0] + g.al - 1) // g.al * g.al
    offs = sorted(x[3] for x in g.t) + [len(b) - base]
    g.data = {}
    for n, d, ty, off in g.t:
        end = min(x for x in offs if x > off) if any(x > off for x in offs) else len(b) - base
        g.data[n] = b[base + off : base + end]
    return g


def write(g, path, version=None, order="<", align=None, gap=0, tail=b"", index="Q"):
    al = align or g.al
    v = version or g.version
    out = bytearray()
    w = lambda f, x: out.extend(struct.pack(order + f, x))

    def s(x):
        x = x.encode() if isinstance(x, str) else x
        w(index, len(x))
        out.extend(x)

    def val(t, x):
        if t == 8:
            s(x)
        elif t == 9:
            et, l = x
            w("I", et)
            w(index, len(l))
            for y in l:
                val(et, y)
        else:
            w(T[t], x)

    out += b"GGUF"
    w("I", v)
    w(index, len(g.t))
    w(index, len(g.kv))
    for k, t, x in g.kv:
        s(k)
        w("I", t)
        val(t, x)
    off = 0
    pos = []
    for n, d, ty, _ in g.t:
        s(n)
        w("I", len(d))
        [w(index, x) for x in d]
        w("I", ty)
        w("Q", off)
        pos.append(off)
        off += (len(g.data[n]) + al - 1) // al * al + gap
    out += b"\0" * (-len(out) % al)
    for (n, d, ty, _), p in zip(g.t, pos):
        out += g.data[n]
        out += b"\0" * (-len(g.data[n]) % al) + b"\0" * gap
    open(path, "wb").write(bytes(out) + tail)


def get(g, k):
    return next((x[2] for x in g.kv if x[0] == k), None)


def setk(g, k, t, v):
    for x in g.kv:
        if x[0] == k:
            x[1], x[2] = t, v
            return
    g.kv.append([k, t, v])


def rm(g, k):
    g.kv = [x for x in g.kv if x[0] != k]


def cp(g):
    return copy.deepcopy(g)
