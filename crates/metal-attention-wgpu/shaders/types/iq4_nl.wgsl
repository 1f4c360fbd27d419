{% include "types/unit.wgsl" %}

{% include "types/iq4.wgsl" %}

{% include "types/nibbles.wgsl" %}

fn codes8(raw: Raw8) -> W8 { return iq4_values(raw.q); }
