{% include "types/unit.wgsl" %}

{% include "types/nibbles.wgsl" %}

fn codes8(raw: Raw8) -> W8 { return nibbles(raw.q, 8.0); }
