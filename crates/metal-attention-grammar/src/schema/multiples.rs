//! Bounds the cost of `multipleOf`, in states of the automaton.

use serde_json::Number;

/// The maximum number of states of all `multipleOf` of a schema together. The automaton for multiples of n has a state
/// for each remainder.
const MAX_STATES: u128 = 100_000;

/// The `multipleOf` values of a schema. Two of them may apply to the same number, which then is a multiple of their
/// least common multiple; so all are counted together.
#[derive(Debug, Default)]
pub struct Multiples {
    /// The least common multiple of the accepted values, as `coefficient / 10^digits`.
    common: Option<(u128, u32)>,
    /// The sum of the states of the accepted values, counted separately.
    states: u128,
}

impl Multiples {
    /// Accepts `number` if the cost stays below the maximum. Returns whether it was accepted.
    pub fn take(&mut self, number: &Number) -> bool {
        let Some((coefficient, digits)) = decimal(number) else { return false };
        let common = match self.common {
            None => Some((coefficient, digits)),
            Some((other, other_digits)) => least_common((coefficient, digits), (other, other_digits)),
        };
        let states = self.states + coefficient;
        match common.filter(|(coefficient, _)| *coefficient <= MAX_STATES && states <= MAX_STATES) {
            Some(common) => {
                (self.common, self.states) = (Some(common), states);
                true
            }
            None => false,
        }
    }
}

/// A positive number as `coefficient / 10^digits`; `None` if it is not positive or has too many digits.
fn decimal(number: &Number) -> Option<(u128, u32)> {
    let text = number.to_string();
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let fraction = fraction.trim_end_matches('0');
    let coefficient: u128 = format!("{whole}{fraction}").parse().ok().filter(|n| *n > 0)?;
    let digits = i32::try_from(fraction.len()).ok()? - exponent.parse::<i32>().ok()?;
    match u32::try_from(digits) {
        Ok(digits) => (digits <= 12).then_some((coefficient, digits)),
        Err(_) => Some((coefficient.checked_mul(10_u128.checked_pow(digits.unsigned_abs())?)?, 0)),
    }
}

fn least_common((a, a_digits): (u128, u32), (b, b_digits): (u128, u32)) -> Option<(u128, u32)> {
    let digits = a_digits.max(b_digits);
    let a = a.checked_mul(10_u128.checked_pow(digits - a_digits)?)?;
    let b = b.checked_mul(10_u128.checked_pow(digits - b_digits)?)?;
    let divisor = greatest_common(a, b);
    Some(((a / divisor).checked_mul(b)?, digits))
}

fn greatest_common(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { greatest_common(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(numbers: &[&str]) -> Vec<bool> {
        let mut multiples = Multiples::default();
        numbers.iter().map(|text| multiples.take(&serde_json::from_str(text).unwrap())).collect()
    }

    #[test]
    fn multiples_are_combined_while_their_least_common_multiple_is_small() {
        assert_eq!(taken(&["9973", "9967", "9949"]), [true, false, false]);
        assert_eq!(taken(&["86400", "100", "365"]), [true, true, false]);
        assert_eq!(taken(&["9999991"]), [false]);
        assert_eq!(taken(&["0.01", "0.25", "5"]), [true, true, true]);
        assert_eq!(taken(&["1e3", "1e-3", "1e300", "1e-300"]), [true, false, false, false]);
        assert_eq!(taken(&["0", "-2"]), [false, false]);
        // Each value costs states of its own, even if it divides another one.
        assert_eq!(taken(&["50000", "25000", "20000", "10000"]), [true, true, true, false]);
    }
}
