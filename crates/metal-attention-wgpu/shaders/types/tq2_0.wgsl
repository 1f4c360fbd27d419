{% set block_units = 32 %}
{% include "types/two_bits.wgsl" %}
