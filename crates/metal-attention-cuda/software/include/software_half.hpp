// CUDA's F16 type and its functions, as far as the kernels use them. Results are rounded to nearest, ties to even.
#pragma once
#include "software_cuda.hpp"

struct __half {
    unsigned short bits;
};
struct __half2 {
    __half x, y;
} __align__(4);
typedef __half half;
typedef __half2 half2;

inline float __half2float(half v) { return (float)software::as<_Float16>(v.bits); }
inline half __float2half_rn(float v) { return {software::as<unsigned short>((_Float16)v)}; }
inline half __float2half(float v) { return __float2half_rn(v); }
inline half __double2half(double v) { return {software::as<unsigned short>((_Float16)v)}; }
inline unsigned short __half_as_ushort(half v) { return v.bits; }
inline half __ushort_as_half(unsigned short bits) { return {bits}; }

inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 __half2half2(half v) { return {v, v}; }
inline half2 make_half2(half x, half y) { return {x, y}; }
inline half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
inline half2 __float2half2_rn(float v) { return __half2half2(__float2half_rn(v)); }
inline float2 __half22float2(half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline half __low2half(half2 v) { return v.x; }
inline half __high2half(half2 v) { return v.y; }
inline float __low2float(half2 v) { return __half2float(v.x); }
inline float __high2float(half2 v) { return __half2float(v.y); }
inline half2 __lows2half2(half2 a, half2 b) { return {a.x, b.x}; }
inline half2 __highs2half2(half2 a, half2 b) { return {a.y, b.y}; }

// F32 has more than twice the bits of F16, so rounding a sum or product to F32 first changes nothing.
inline half __hadd(half a, half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
inline half __hsub(half a, half b) { return __float2half_rn(__half2float(a) - __half2float(b)); }
inline half __hmul(half a, half b) { return __float2half_rn(__half2float(a) * __half2float(b)); }
inline half __hfma(half a, half b, half c) { return __double2half((double)__half2float(a) * __half2float(b) + __half2float(c)); }
inline half __hneg(half v) { return {(unsigned short)(v.bits ^ 0x8000)}; }
inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline half2 __hsub2(half2 a, half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline half2 __low2half2(half2 v) { return {v.x, v.x}; }
inline half2 __high2half2(half2 v) { return {v.y, v.y}; }
inline half2 __hneg2(half2 v) { return {__hneg(v.x), __hneg(v.y)}; }
