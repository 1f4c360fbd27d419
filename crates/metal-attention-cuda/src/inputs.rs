//! The inputs of a step as kernels read them: tokens, query tiles, and the spans of embedding rows among them.
//!
//! All uploads are in the order of the stream: kernels that are launched next read them, kernels in flight still read the old
//! ones.

use std::sync::Arc;

use metal_attention_model::{LastSeen, Step, StepInputs, StepSpan};

use crate::CudaError;
use crate::activations::Activations;
use crate::args::{QueryTileArgs, TokenArgs};
use crate::executor::CudaExecutor;

/// The query tiles of a micro-batch: runs of tokens of one sequence, cut into tiles for the blocks of `prefill_attention.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct QueryTiles {
    /// Their number; 0 in a decode step, which has one token of each sequence.
    pub(crate) count: usize,
    /// Which kernel they are for.
    pub(crate) kernel: TileKernel,
}

/// The kernels over query tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum TileKernel {
    /// `prefill_attention_*`: tiles of up to 64 tokens.
    #[default]
    Prefill,
    /// `verify_attention_*`, which divides the KV pages among blocks, for runs of a few tokens: tiles of up to 16 tokens.
    Verify,
}

impl TileKernel {
    /// The kernel for runs of which the longest has `longest` tokens.
    fn of_runs(longest: usize) -> Self {
        if longest <= 2 * Self::Verify.tile_tokens() { Self::Verify } else { Self::Prefill }
    }

    /// Most tokens of a tile.
    fn tile_tokens(self) -> usize {
        match self {
            Self::Prefill => 64,
            Self::Verify => 16,
        }
    }
}

/// The spans of embedding rows of a step, and a list of tokens for each layer where layers differ in what inputs attend to.
pub(crate) struct SpanInputs {
    /// The spans.
    inputs: Arc<StepInputs>,
    /// The index of the first input of each span in the micro-batch.
    first: Vec<usize>,
    /// The list of each layer.
    seen: LastSeen,
    /// The tokens of each list, `[n_lists][n_tokens]`.
    lists: Vec<Vec<TokenArgs>>,
}

impl SpanInputs {
    /// The spans of a step, with what [`CudaExecutor::upload_tokens`] has returned; `None` in a step of token ids alone whose layers
    /// have one list.
    pub(crate) fn new(step: &Step, seen: LastSeen, lists: Vec<Vec<TokenArgs>>) -> Option<Self> {
        if step.inputs.is_none() && lists.len() == 1 {
            return None;
        }
        let first = step.spans().map(|(first, _)| first).collect();
        Some(Self { inputs: step.inputs.clone().unwrap_or_default(), first, seen, lists })
    }

    /// The spans, each with the index of its first input in the micro-batch.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &StepSpan)> {
        self.first.iter().copied().zip(&self.inputs.spans)
    }

    /// The index of the list of tokens that layer `layer` reads. The first list is uploaded with the micro-batch.
    pub(crate) fn list_of(&self, layer: usize) -> usize {
        self.seen.list_of(layer)
    }

    /// Uploads a list of tokens in place of the one before, and its query tiles if the micro-batch has any. Returns these.
    /// Memory for all lists is not allocated, since an allocation may wait for other ranks, which wait for this one within a step.
    pub(crate) fn upload_list(
        &self,
        list: usize,
        query_tiles: QueryTiles,
        buffers: &Activations,
    ) -> Result<QueryTiles, CudaError> {
        buffers.tokens.write(0, bytemuck::cast_slice(&self.lists[list]))?;
        if query_tiles.count > 0 { upload_query_tiles(&self.lists[list], buffers) } else { Ok(query_tiles) }
    }
}

impl CudaExecutor {
    /// Uploads the tokens of a step, the indices of its output tokens, and the RoPE rows of positions that have their own. Returns the
    /// lists of last indices and the tokens of each, `[n_lists][n_tokens]`; those of the first list are the ones that were uploaded.
    pub(crate) fn upload_tokens(&self, step: &Step) -> Result<(LastSeen, Vec<Vec<TokenArgs>>), CudaError> {
        let positions: Vec<_> = step.tokens.iter().map(|token| step.position(token)).collect();
        let ropes = &self.runner.weights.ropes;
        ropes.write_rows(&positions)?;
        let seen = step.last_seen(&self.spec);
        let list = |lasts: &Vec<u32>| {
            let inputs = step.tokens.iter().zip(&positions).zip(lasts).enumerate();
            let token = inputs.map(|(i, ((token, &position), &last))| TokenArgs {
                id: token.id,
                seq: token.seq as u32,
                pos: token.pos as u32,
                last,
                position: position.0[0],
                rope_row: ropes.row(i, position),
            });
            token.collect::<Vec<_>>()
        };
        let lists: Vec<_> = seen.lists.iter().map(list).collect();
        let outputs = step.tokens.iter().enumerate().filter(|(_, token)| token.output).map(|(i, _)| i as u32);
        let outputs: Vec<u32> = outputs.collect();
        self.runner.buffers.tokens.write(0, bytemuck::cast_slice(&lists[0]))?;
        self.runner.buffers.output_rows.write(0, bytemuck::cast_slice(&outputs))?;
        Ok((seen, lists))
    }
}

/// Uploads the query tiles of `tokens`.
pub(crate) fn upload_query_tiles(tokens: &[TokenArgs], buffers: &Activations) -> Result<QueryTiles, CudaError> {
    let (tiles, kernel) = query_tiles(tokens);
    buffers.query_tiles.write(0, bytemuck::cast_slice(&tiles))?;
    Ok(QueryTiles { count: tiles.len(), kernel })
}

/// Cuts the runs of a micro-batch into query tiles. A sequence may have several runs, with tokens of other sequences in between.
fn query_tiles(tokens: &[TokenArgs]) -> (Vec<QueryTileArgs>, TileKernel) {
    // The index up to which a token sees, if it or the token before it sees later ones; `None`: up to its own.
    let mut ends: Vec<Option<u32>> = Vec::with_capacity(tokens.len());
    for (i, token) in tokens.iter().enumerate() {
        let of_previous = i.checked_sub(1).filter(|&j| tokens[j].seq == token.seq).and_then(|j| ends[j]);
        ends.push(if token.last > token.pos { Some(token.last) } else { of_previous.filter(|&end| end == token.pos) });
    }
    let inputs: Vec<_> = tokens.iter().zip(ends).enumerate().collect();
    let runs =
        inputs.chunk_by(|(_, (a, end)), (_, (b, end_of_b))| a.seq == b.seq && a.pos + 1 == b.pos && end == end_of_b);
    let kernel = TileKernel::of_runs(runs.clone().map(<[_]>::len).max().unwrap_or(0));
    let tiles = runs.flat_map(|run| run.chunks(kernel.tile_tokens())).map(|tile| {
        let (first, (TokenArgs { seq, pos, .. }, end)) = tile[0];
        let last = end.unwrap_or(*pos);
        QueryTileArgs { token: first as u32, n: tile.len() as u32, seq: *seq, pos: *pos, last }
    });
    (tiles.collect(), kernel)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    #[test]
    fn tiles_end_with_their_sequence_with_64_tokens_and_where_a_span_begins_or_ends() {
        let tokens = |seq, pos: Range<u32>, last: Option<u32>| {
            let token = move |pos| TokenArgs { id: 0, seq, pos, last: last.unwrap_or(pos), position: 0, rope_row: 0 };
            pos.map(token).collect::<Vec<_>>()
        };
        let tiles = |tokens: &[Vec<TokenArgs>]| {
            query_tiles(&tokens.concat()).0.iter().map(|t| [t.token, t.n, t.seq, t.pos, t.last]).collect::<Vec<_>>()
        };
        let text = [tokens(0, 5..75, None), tokens(1, 0..3, None), tokens(0, 75..76, None)];
        assert_eq!(tiles(&text), [[0, 64, 0, 5, 5], [64, 6, 0, 69, 69], [70, 3, 1, 0, 0], [73, 1, 0, 75, 75]]);
        // A bidirectional span at 3 to 69, another one directly behind it, and text.
        let spans =
            [tokens(0, 0..3, None), tokens(0, 3..70, Some(69)), tokens(0, 70..72, Some(71)), tokens(0, 72..74, None)];
        let want = [[0, 3, 0, 0, 0], [3, 64, 0, 3, 69], [67, 3, 0, 67, 69], [70, 2, 0, 70, 71], [72, 2, 0, 72, 72]];
        assert_eq!(tiles(&spans), want);
        // Sequences under a mask that is not causal.
        let whole = [tokens(0, 0..65, Some(64)), tokens(1, 0..2, Some(1))];
        assert_eq!(tiles(&whole), [[0, 64, 0, 0, 64], [64, 1, 0, 64, 64], [65, 2, 1, 0, 1]]);
        // Drafts of two sequences: tiles for `verify_attention`.
        let drafts = [tokens(0, 100..117, None), tokens(3, 7..9, None)];
        assert_eq!(tiles(&drafts), [[0, 16, 0, 100, 100], [16, 1, 0, 116, 116], [17, 2, 3, 7, 7]]);
        assert_eq!(query_tiles(&drafts.concat()).1, TileKernel::Verify);
        assert_eq!(query_tiles(&tokens(0, 0..33, None)).1, TileKernel::Prefill);
    }
}
