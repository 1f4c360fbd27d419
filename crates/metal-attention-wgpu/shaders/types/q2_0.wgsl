{% set block_units = 8 %}
{% include "types/two_bits.wgsl" %}
