// Functions of elements of encoders of pictures.
#pragma once
#include "common.cuh"

enum Function : u32 { GELU_TANH = 0, GELU_ERF = 1, QUICK_GELU = 2, SILU_OF = 3, SUM = 4, PRODUCT = 5, SCALED = 6, CLAMPED = 7, SQUARED_RELU = 8 };

__device__ __forceinline__ float gelu_erf(float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678118654752440f)); }

// An activation.
__device__ __forceinline__ float activated(u32 function, float v) {
    switch (function) {
        case GELU_TANH: return 0.5f * v * (1.0f + tanhf(0.79788456080286535588f * (v + 0.044715f * v * v * v)));
        case GELU_ERF: return gelu_erf(v);
        case QUICK_GELU: return v / (1.0f + expf(-1.702f * v));
        case SQUARED_RELU: return v * fmaxf(v, 0.0f);
        default: return v / (1.0f + expf(-v));
    }
}

// Calls `body` with an activation as a function of a float, to seven digits, for results that are rounded to F16. The choice is made once
// and not for each element, whose computations then overlap. All but two are v times a logistic function of v (linear + cubic v^2): GELU by
// tanh is one since (1 + tanh(x)) / 2 = 1 / (1 + exp(-2 x)).
template <typename Body> __device__ __forceinline__ void with_activation(u32 function, Body body) {
    if (function == GELU_ERF) return body([](float v) { return gelu_erf(v); });
    if (function == SQUARED_RELU) return body([](float v) { return v * fmaxf(v, 0.0f); });
    const float linear = function == GELU_TANH ? 1.59576912160573071176f : function == QUICK_GELU ? 1.702f : 1.0f;
    const float cubic = function == GELU_TANH ? 0.044715f * linear : 0.0f;
    body([=](float v) { return __fdividef(v, 1.0f + __expf(-v * (linear + cubic * v * v))); });
}
