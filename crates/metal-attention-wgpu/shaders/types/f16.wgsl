{% include "types/unit.wgsl" %}

{% include "types/words.wgsl" %}

fn codes8(raw: Raw8) -> W8 {
    return W8(
        vec4<f32>(unpack2x16float(raw.q.x), unpack2x16float(raw.q.y)),
        vec4<f32>(unpack2x16float(raw.q.z), unpack2x16float(raw.q.w)),
    );
}
