//! The highest logits, as a short list to sample from.

/// Token ids with their logits: highest logit first, lowest id first among equals.
pub type TopK = Vec<(u32, f32)>;

/// The `k` highest of `logits` with their ids, NaN left out; all of them if there are no more than `k`.
///
/// ```
/// use metal_attention_model::highest;
///
/// assert_eq!(highest(&[0.5, f32::NAN, 2.0, 0.5], 2), [(2, 2.0), (0, 0.5)]);
/// ```
pub fn highest(logits: &[f32], k: usize) -> TopK {
    /// Few of these blocks contain a logit above the floor, and testing a whole block takes a few vector instructions.
    const BLOCK: usize = 32;
    if k == 0 {
        return TopK::new();
    }
    let floor = floor(logits, k);
    let mut list = Vec::with_capacity(logits.len().min(k.saturating_mul(2)));
    for (block, first) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        // NaN is below the floor.
        #[expect(clippy::needless_bitwise_bool, reason = "a loop that goes to its end is done with vectors")]
        let any = block.iter().fold(false, |any, &logit| any | (logit >= floor));
        if any {
            let high = block.iter().zip(first..).filter(|&(&logit, _)| logit >= floor);
            list.extend(high.map(|(&logit, id)| rank(id, logit)));
        }
    }
    if list.len() > k {
        list.select_nth_unstable(k - 1);
        list.truncate(k);
    }
    list.sort_unstable();
    list.into_iter().map(|rank: u64| (rank as u32, logits[rank as u32 as usize])).collect()
}

/// A lower bound of the `k` highest logits that few others exceed. The logits are divided into `4 k` groups; the result
/// is the `k`-th highest of the groups' maxima, so at least `k` logits are no lower.
fn floor(logits: &[f32], k: usize) -> f32 {
    let n_groups = k.saturating_mul(4);
    if n_groups >= logits.len() {
        return f32::NEG_INFINITY;
    }
    let mut maxima = vec![f32::NEG_INFINITY; n_groups];
    for row in logits.chunks(n_groups) {
        for (max, &logit) in maxima.iter_mut().zip(row) {
            // Not f32::max, which takes three instructions for the sake of NaN.
            *max = if logit > *max { logit } else { *max };
        }
    }
    *maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

/// A sort key, lowest first: a number that falls as the logit rises, then the id. Integers sort several times as fast
/// as pairs of a float and an id.
fn rank(id: u32, logit: f32) -> u64 {
    // -0.0 equals 0.0.
    let bits = (logit + 0.0).to_bits();
    let falling = if bits >> 31 == 0 { !bits & (u32::MAX >> 1) } else { bits };
    u64::from(falling) << 32 | u64::from(id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_highest_are_those_of_a_sort(
            logits in prop::collection::vec(
                prop_oneof![
                    4 => -3.0f32..3.0,
                    2 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1.0]),
                ],
                0..400,
            ),
            k in 0usize..300,
        ) {
            let mut all: TopK = (0..).zip(logits.iter().copied()).filter(|(_, logit)| !logit.is_nan()).collect();
            // Stable: equals stay in the order of their ids.
            all.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("not NaN"));
            all.truncate(k);
            let bits = |list: TopK| list.into_iter().map(|(id, logit)| (id, logit.to_bits())).collect::<Vec<_>>();
            prop_assert_eq!(bits(highest(&logits, k)), bits(all));
        }
    }
}
