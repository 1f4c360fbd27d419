//! Temperature, fixed or dynamic (by entropy).

use super::candidates::{Candidates, Softmax};

/// Divides the logits by `temperature`; at 0 only the highest is kept.
///
/// With a `range` above 0 the temperature is dynamic: between `temperature - range` (not below 0) and
/// `temperature + range`, nearer to the upper end the flatter the distribution is. Flatness is the entropy over its
/// maximum, raised to `exponent`.
pub(super) fn temperature(candidates: &mut Candidates, temperature: f32, range: f32, exponent: f32) {
    let temperature = if range > 0.0 && candidates.as_slice().len() > 1 {
        let items = candidates.as_slice();
        let entropy = Softmax::of(items).entropy(items);
        let flatness = (entropy / (items.len() as f64).ln()).clamp(0.0, 1.0);
        let lowest = f64::from((temperature - range).max(0.0));
        let highest = f64::from(temperature) + f64::from(range);
        (lowest + (highest - lowest) * flatness.powf(f64::from(exponent))) as f32
    } else {
        temperature
    };
    candidates.divide_by(temperature);
}
