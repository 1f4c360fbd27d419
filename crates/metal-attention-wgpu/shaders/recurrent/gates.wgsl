// Activations of the recurrences' gates.
// Bounds: no buffer is accessed, and nothing loops.

// The bound avoids infinities: drivers may assume that there are none.
fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(min(-x, 80.0))); }

// ln(1 + e^x), precise also where it is tiny: max(x, 0) + ln(1 + y), y = e^-|x|, and ln(1 + y) = 2 artanh(s) with
// s = y / (2 + y), at most a third, as a series.
fn softplus(x: f32) -> f32 {
    let y = exp(-min(abs(x), 80.0));
    let s = y / (2.0 + y);
    let q = s * s;
    let p = 2.0 + q * (0.6666667 + q * (0.4 + q * (0.2857143 + q * (0.2222222 + q * (0.1818182 + q * (0.1538462 + q * 0.1333333))))));
    return max(x, 0.0) + s * p;
}
