//! The highest logits: a short list to sample from.

/// Tokens and their logits, highest logit first, lowest id first among equals.
pub type TopK = Vec<(u32, f32)>;

/// The `k` highest of `logits` with their ids, NaN left out; all of them where there are no more than `k`.
///
/// ```
/// use metal_attention_model::highest;
///
/// assert_eq!(highest(&[0.5, f32::NAN, 2.0, 0.5], 2), [(2, 2.0), (0, 0.5)]);
/// ```
pub fn highest(logits: &[f32], k: usize) -> TopK {
    /// Few of these blocks hold any logit that matters, and one look at a whole block is a few vector instructions.
    const BLOCK: usize = 32;
    let by_logit = |a: &(u32, f32), b: &(u32, f32)| b.1.partial_cmp(&a.1).expect("not NaN").then(a.0.cmp(&b.0));
    if k == 0 {
        return TopK::new();
    }
    // The best so far are gathered; whenever twice as many as needed are there, the lower half goes and the floor rises.
    let room = k.saturating_mul(2).max(BLOCK);
    let mut list = TopK::new();
    let mut floor = f32::NEG_INFINITY;
    for (block, first) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        // NaN is not at least the floor.
        if block.iter().filter(|&&logit| logit >= floor).count() == 0 {
            continue;
        }
        for (&logit, id) in block.iter().zip(first..) {
            if logit >= floor {
                list.push((id, logit));
            }
            if list.len() == room {
                list.select_nth_unstable_by(k - 1, by_logit);
                list.truncate(k);
                // What equals the lowest of them comes later, so it is not among the best.
                floor = list[k - 1].1.next_up();
            }
        }
    }
    list.sort_unstable_by(by_logit);
    list.truncate(k);
    list
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
