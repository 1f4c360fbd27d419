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
    let by_logit = |a: &(u32, f32), b: &(u32, f32)| b.1.partial_cmp(&a.1).expect("not NaN").then(a.0.cmp(&b.0));
    let mut list: TopK = (0..).zip(logits.iter().copied()).filter(|(_, logit)| !logit.is_nan()).collect();
    if (1..list.len()).contains(&k) {
        list.select_nth_unstable_by(k - 1, by_logit);
    }
    list.truncate(k);
    list.sort_unstable_by(by_logit);
    list
}
