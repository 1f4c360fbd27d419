//! A batch of tokens as the kernels read it.

use metal_attention_model::BatchToken;

/// The words of the batch buffer, `[1 + n_tokens, 4]`: first (number of tokens, number of wanted tokens, 0, 0), then
/// for each token (id, position, sequence, w), where the `i`-th `w` is the index of the `i`-th token whose logits are
/// wanted.
pub fn batch_words(tokens: &[BatchToken]) -> Vec<[u32; 4]> {
    let wanted: Vec<u32> = (0u32..).zip(tokens).filter(|(_, t)| t.logits).map(|(i, _)| i).collect();
    let mut words = vec![[tokens.len() as u32, wanted.len() as u32, 0, 0]];
    words.extend(
        tokens.iter().enumerate().map(|(i, t)| [t.id, t.pos as u32, t.seq as u32, wanted.get(i).copied().unwrap_or(0)]),
    );
    words
}
