//! How many states numbers cost that must be multiples of others.

use serde_json::Number;

/// Most states of all multiples of a schema together: a number that is a multiple of n is read with a state for each remainder.
const MAX_STATES: u128 = 100_000;

/// The multiples of a schema. Two of them may hold for one number, whose multiple is their least common one, so all count together.
#[derive(Debug, Default)]
pub struct Multiples {
    /// The least common multiple of those taken, as `coefficient / 10^digits`.
    common: Option<(u128, u32)>,
    /// States of those taken, were none of them to meet another.
    states: u128,
}

impl Multiples {
    /// Whether numbers may be held to being multiples of `number`, too.
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

/// A number above 0 as `coefficient / 10^digits`; none where that is too long.
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
    fn multiples_are_taken_while_their_least_common_one_is_small() {
        assert_eq!(taken(&["9973", "9967", "9949"]), [true, false, false]);
        assert_eq!(taken(&["86400", "100", "365"]), [true, true, false]);
        assert_eq!(taken(&["9999991"]), [false]);
        assert_eq!(taken(&["0.01", "0.25", "5"]), [true, true, true]);
        assert_eq!(taken(&["1e3", "1e-3", "1e300", "1e-300"]), [true, false, false, false]);
        assert_eq!(taken(&["0", "-2"]), [false, false]);
        // Each by itself costs states, though none meets another.
        assert_eq!(taken(&["50000", "25000", "20000", "10000"]), [true, true, true, false]);
    }
}
