//! [`Encoder::run`]: the stages of an encoder over the pixels of pictures, written once for all backends.

use std::sync::Arc;

use super::geometry::{Layout, MergeOrder, NO_ROW, Place};
use super::kept::{KeptOf, KeptRows};
use super::ops::{AttentionSegment, EncoderOps};
use super::positions::sinusoids;
use super::relative::attend_by_distance;
use super::stages::{
    Block, Colours, Encoder, EncoderAttention, EncoderNorm, EncoderTypes, PatchOrder, PatchSpec, QueryAttention,
    Resampler, Stage,
};

/// The pixels of a picture whose sides are whole patches.
#[derive(Debug, Clone, Copy)]
pub struct Pixels<'a> {
    /// Red, green and blue of each pixel, `[height, width, 3]`.
    pub rgb: &'a [u8],
    /// Pixels of a row.
    pub width: usize,
    /// Rows of pixels.
    pub height: usize,
}

/// The rows of embeddings of a picture.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedPicture {
    /// `[n_rows, n_embd]`: the embedding of each row.
    pub rows: Vec<f32>,
    /// The same for what is added to the rows after each of the first layers.
    pub deepstack: Vec<Vec<f32>>,
    /// Columns of the grid of rows.
    pub nx: usize,
    /// Rows of the grid.
    pub ny: usize,
}

/// Rows of all pictures, one picture after the other.
pub(super) struct State<R> {
    pub(super) rows: R,
    /// The layout of each picture's rows.
    pub(super) layouts: Vec<Layout>,
}

impl PatchSpec {
    /// The patches of pictures, row by row, `[n_patches, 3 * side * side]`. Pixels beyond whole patches are left out.
    pub fn cut(self, colours: Colours, pictures: &[Pixels<'_>]) -> Vec<f32> {
        let Self { side, order } = self;
        let tables = colours.table();
        let n_patches: usize = pictures.iter().map(|pixels| pixels.width / side * (pixels.height / side)).sum();
        let mut rows = vec![0.0; n_patches * 3 * side * side];
        let patches = pictures.iter().flat_map(|pixels| {
            let nx = pixels.width / side;
            (0..pixels.height / side * nx).map(move |i| (pixels, i / nx * side, i % nx * side))
        });
        for ((pixels, y, x), patch) in patches.zip(rows.chunks_exact_mut(3 * side * side)) {
            let row = |v: usize| pixels.rgb[3 * ((y + v) * pixels.width + x)..][..3 * side].as_chunks::<3>().0;
            match order {
                PatchOrder::PixelFirst => {
                    for (v, to) in patch.chunks_exact_mut(3 * side).enumerate() {
                        for (to, rgb) in to.as_chunks_mut::<3>().0.iter_mut().zip(row(v)) {
                            *to = [0, 1, 2].map(|c| tables[c][usize::from(rgb[c])]);
                        }
                    }
                }
                PatchOrder::ColourFirst => {
                    for (c, of_colour) in patch.chunks_exact_mut(side * side).enumerate() {
                        for (v, to) in of_colour.chunks_exact_mut(side).enumerate() {
                            to.iter_mut().zip(row(v)).for_each(|(to, rgb)| *to = tables[c][usize::from(rgb[c])]);
                        }
                    }
                }
            }
        }
        rows
    }
}

impl<T: EncoderTypes> Encoder<T> {
    /// Encodes pictures, all together. Each may have a size of its own, of at least one patch. `kept` is that of the last run.
    ///
    /// # Errors
    ///
    /// Those of `ops`.
    pub fn run<O: EncoderOps<Types = T>>(
        &self,
        ops: &mut O,
        kept: &mut KeptRows<O::Rows>,
        pictures: &[Pixels<'_>],
    ) -> Result<Vec<EncodedPicture>, O::Error> {
        let side = self.patch.side;
        let grids = pictures.iter().map(|pixels| Layout::grid(pixels.width / side, pixels.height / side));
        let layouts: Vec<_> = grids.collect();
        let state = State { rows: ops.patches(self.patch, self.colours, pictures)?, layouts };
        let state = run_stages(ops, kept, &self.stages, state)?;
        let mut parts = ops.read(&state.rows, self.n_embd)?;
        if let ([Layout { nx, ny, .. }], false) = (&state.layouts[..], parts.is_empty()) {
            let deepstack = parts.split_off(1);
            return Ok(vec![EncodedPicture { rows: parts.remove(0), deepstack, nx: *nx, ny: *ny }]);
        }
        let mut first = 0;
        let pictures = state.layouts.iter().map(|layout| {
            let end = first + layout.places.len() * self.n_embd;
            let mut of_picture = parts.iter().map(|part| part[first..end].to_vec());
            let rows = of_picture.next().unwrap_or_default();
            let picture = EncodedPicture { rows, deepstack: of_picture.collect(), nx: layout.nx, ny: layout.ny };
            first = end;
            picture
        });
        Ok(pictures.collect())
    }
}

/// Runs `stages` over `state`.
pub(super) fn run_stages<O: EncoderOps>(
    ops: &mut O,
    kept: &mut KeptRows<O::Rows>,
    stages: &[Stage<O::Types>],
    state: State<O::Rows>,
) -> Result<State<O::Rows>, O::Error> {
    let State { mut rows, mut layouts } = state;
    let mut features = Vec::new();
    for stage in stages {
        match stage {
            Stage::Linear(linear) => rows = ops.linear(&rows, linear)?,
            Stage::Norm(norm) => rows = ops.norm(&rows, norm)?,
            Stage::Activation(activation) => ops.activate(&mut rows, *activation)?,
            Stage::Scale(factor) => ops.scale(&mut rows, *factor)?,
            Stage::ScaleColumns(factors) => ops.scale_columns(&mut rows, factors)?,
            Stage::AddRow(row) => ops.add_row(&mut rows, row)?,
            Stage::Positions(table) => {
                let of = KeptOf::Positions(Arc::clone(table));
                let positions = kept.rows(ops, of, &layouts, table.width, |layout| table.of(layout))?;
                ops.add(&mut rows, positions)?;
            }
            Stage::Others { before, after } => {
                let width = ops.width(&rows);
                let (n_before, n_after) = (before.len() / width, after.len() / width);
                let insert = |layout: &Layout| {
                    let behind = (0..n_after).map(|i| (layout.places.len(), n_before + i));
                    (0..n_before).map(|i| (0, i)).chain(behind).collect()
                };
                let new = [&before[..], after].concat();
                rows = insert_rows(ops, &rows, &new, Place::Class, &mut layouts, insert)?;
            }
            Stage::RowBreaks { row, after_last } => {
                let n_breaks = |layout: &Layout| if *after_last { layout.ny } else { layout.ny.saturating_sub(1) };
                let insert = |layout: &Layout| (1..=n_breaks(layout)).map(|y| (y * layout.nx, 0)).collect();
                rows = insert_rows(ops, &rows, row, Place::Break, &mut layouts, insert)?;
            }
            Stage::DropOthers => rows = rearrange(ops, &rows, &mut layouts, Layout::drop_others)?,
            Stage::Queries(tables) => {
                let width = ops.width(&rows);
                let rows_of = |n: usize| {
                    let before = tables.iter().take_while(|table| table.len() != n * width);
                    let start = before.map(|table| table.len() / width).sum::<usize>();
                    let is_known = tables.iter().any(|table| table.len() == n * width);
                    start..if is_known { start + n } else { start }
                };
                let insert = |layout: &Layout| {
                    let n = layout.places.len();
                    rows_of(n).map(|row| (n, row)).collect()
                };
                rows = insert_rows(ops, &rows, &tables.concat(), Place::Class, &mut layouts, insert)?;
            }
            Stage::KeepQueries => rows = rearrange(ops, &rows, &mut layouts, Layout::keep_queries)?,
            Stage::Reorder(order) => rows = rearrange(ops, &rows, &mut layouts, |layout| layout.reorder(*order))?,
            Stage::Block(block) => run_block(ops, block, &mut rows, &layouts, kept)?,
            Stage::Merge { side, order } => {
                let transposed = match order {
                    MergeOrder::PatchFirst | MergeOrder::ValueFirst => false,
                    MergeOrder::Transposed => true,
                };
                let parts = rearrange(ops, &rows, &mut layouts, |layout| layout.merge(*side, transposed))?;
                rows = join_neighbours(ops, parts, side * side);
                if *order == MergeOrder::ValueFirst {
                    rows = ops.interleave(&rows, side * side)?;
                }
            }
            Stage::Pool { side } => {
                let parts = rearrange(ops, &rows, &mut layouts, |layout| layout.merge(*side, false))?;
                rows = ops.mean(&parts, side * side)?;
            }
            Stage::Unfold { side, stride, centred } => {
                let parts = rearrange(ops, &rows, &mut layouts, |layout| layout.unfold(*side, *stride, *centred))?;
                rows = join_neighbours(ops, parts, side * side);
            }
            Stage::Depthwise { side, stride, kernel } => {
                let windows = rearranged(&mut layouts, |layout| layout.unfold(*side, *stride, false));
                rows = ops.weighted_sum(&rows, &windows, side * side, kernel)?;
            }
            Stage::Enlarge { factor } => rows = rearrange(ops, &rows, &mut layouts, |layout| layout.enlarge(*factor))?,
            Stage::QueryAttention(attention) => rows = run_query_attention(ops, kept, attention, &rows, &layouts)?,
            Stage::FeedForward(feed_forward) => rows = ops.feed_forward(&rows, feed_forward)?,
            Stage::Attention(attention) => {
                let attended = attend(ops, attention, &rows, &layouts, kept)?;
                rows = ops.linear(&attended, &attention.out)?;
            }
            Stage::Sum([first, second]) => {
                let copy = State { rows: ops.copy(&rows)?, layouts: layouts.clone() };
                let second = run_stages(ops, kept, second, copy)?;
                State { rows, layouts } = run_stages(ops, kept, first, State { rows, layouts })?;
                ops.add(&mut rows, &second.rows)?;
            }
            Stage::Windows { side, stages } => rows = run_windows(ops, kept, *side, stages, &rows, &layouts)?,
            Stage::Squares(stages) => {
                State { rows, layouts } = run_squares(ops, kept, stages, State { rows, layouts })?;
            }
            Stage::Separator { row, ny } => {
                let insert = |layout: &Layout| {
                    if layout.ny == *ny { vec![(layout.places.len(), 0)] } else { Vec::new() }
                };
                rows = insert_rows(ops, &rows, row, Place::Break, &mut layouts, insert)?;
            }
            Stage::Feature(stages) => {
                let copy = State { rows: ops.copy(&rows)?, layouts: layouts.clone() };
                features.push(run_stages(ops, kept, stages, copy)?.rows);
            }
            Stage::JoinFeatures { with_rows } => {
                let first = with_rows.then_some(&rows);
                let parts: Vec<_> = first.into_iter().chain(&features).collect();
                rows = ops.join_columns(&parts)?;
                features.clear();
            }
            Stage::Resampler(resampler) => rows = run_resampler(ops, kept, resampler, &rows, &mut layouts)?,
        }
    }
    Ok(State { rows, layouts })
}

/// Runs `stages` over windows of `side` x `side` patches.
fn run_windows<O: EncoderOps>(
    ops: &mut O,
    kept: &mut KeptRows<O::Rows>,
    side: usize,
    stages: &[Stage<O::Types>],
    rows: &O::Rows,
    layouts: &[Layout],
) -> Result<O::Rows, O::Error> {
    let (mut order, mut back, mut first) = (Vec::new(), Vec::new(), 0);
    for layout in layouts {
        let (windows, places) = layout.filled_windows(side);
        let moved = |by: u32| move |row: u32| if row == NO_ROW { NO_ROW } else { by + row };
        back.extend(places.into_iter().map(moved(order.len() as u32)));
        order.extend(windows.into_iter().map(moved(first)));
        first += layout.places.len() as u32;
    }
    let windows = vec![Layout::grid(side, side); order.len() / (side * side)];
    let state = State { rows: ops.gather(rows, &order)?, layouts: windows };
    let state = run_stages(ops, kept, stages, state)?;
    ops.gather(&state.rows, &back)
}

/// Runs `stages` over the squares of which pictures consist, and puts the results beside each other.
fn run_squares<O: EncoderOps>(
    ops: &mut O,
    kept: &mut KeptRows<O::Rows>,
    stages: &[Stage<O::Types>],
    state: State<O::Rows>,
) -> Result<State<O::Rows>, O::Error> {
    let squares_of = |layout: &Layout| {
        let n = layout.ny.checked_div(layout.nx);
        n.filter(|n| *n > 1 && n * layout.nx == layout.ny).unwrap_or(1)
    };
    let counts: Vec<usize> = state.layouts.iter().map(squares_of).collect();
    let squares = state.layouts.iter().zip(&counts);
    let squares = squares.flat_map(|(layout, &n)| vec![Layout::grid(layout.nx, layout.ny / n); n]).collect();
    let State { rows, layouts } = run_stages(ops, kept, stages, State { rows: state.rows, layouts: squares })?;
    if counts.iter().all(|n| *n == 1) {
        return Ok(State { rows, layouts });
    }
    let (mut order, mut joined, mut rest, mut first) = (Vec::new(), Vec::new(), &layouts[..], 0);
    for n in counts {
        let (of_picture, after) = rest.split_at(n);
        rest = after;
        let (nx, ny) = (of_picture[0].nx, of_picture[0].ny);
        let at = |y, square, x| first + ((square * ny + y) * nx + x) as u32;
        for y in 0..ny {
            order.extend((0..n).flat_map(|square| (0..nx).map(move |x| at(y, square, x))));
        }
        first += (n * nx * ny) as u32;
        joined.push(Layout::grid(n * nx, ny));
    }
    Ok(State { rows: ops.gather(&rows, &order)?, layouts: joined })
}

/// The rows of all pictures in another order, which `change` returns for each.
fn rearrange<O: EncoderOps>(
    ops: &mut O,
    rows: &O::Rows,
    layouts: &mut [Layout],
    change: impl Fn(&mut Layout) -> Vec<u32>,
) -> Result<O::Rows, O::Error> {
    let all = rearranged(layouts, change);
    ops.gather(rows, &all)
}

/// The indices of rows that `change` returns for each picture, as indices among the rows of all.
fn rearranged(layouts: &mut [Layout], change: impl Fn(&mut Layout) -> Vec<u32>) -> Vec<u32> {
    let mut first = 0;
    let mut all = Vec::new();
    for layout in layouts {
        let n = layout.places.len() as u32;
        all.extend(change(layout).into_iter().map(|row| if row == NO_ROW { NO_ROW } else { first + row }));
        first += n;
    }
    all
}

/// Each `n` rows that follow each other as one.
fn join_neighbours<O: EncoderOps>(ops: &mut O, rows: O::Rows, n: usize) -> O::Rows {
    let width = n * ops.width(&rows);
    ops.reshape(rows, width)
}

/// Inserts rows of `new` into each picture. `at` returns, in rising order, the index of the row before which one stands, and its
/// own index among the rows of `new`.
fn insert_rows<O: EncoderOps>(
    ops: &mut O,
    rows: &O::Rows,
    new: &[f32],
    place: Place,
    layouts: &mut [Layout],
    at: impl Fn(&Layout) -> Vec<(usize, usize)>,
) -> Result<O::Rows, O::Error> {
    let width = ops.width(rows);
    let new = ops.upload([new.len() / width, width], || new.to_vec())?;
    let both = ops.join_rows(rows, &new)?;
    let n_rows = layouts.iter().map(|layout| layout.places.len()).sum::<usize>() as u32;
    let (mut first, mut order) = (0, Vec::new());
    for layout in layouts {
        let mut places = Vec::new();
        let mut at = at(layout).into_iter().peekable();
        for i in 0..=layout.places.len() {
            while let Some((_, row)) = at.next_if(|(before, _)| *before == i) {
                order.push(n_rows + row as u32);
                places.push(place);
            }
            if let Some(place) = layout.places.get(i) {
                order.push(first + i as u32);
                places.push(*place);
            }
        }
        first += layout.places.len() as u32;
        layout.places = places;
    }
    ops.gather(&both, &order)
}

/// Runs a transformer block over the residual stream `x`.
fn run_block<O: EncoderOps>(
    ops: &mut O,
    block: &Block<O::Types>,
    x: &mut O::Rows,
    layouts: &[Layout],
    kept: &mut KeptRows<O::Rows>,
) -> Result<(), O::Error> {
    let input = ops.norm(x, &block.attention_norm)?;
    let attended = attend(ops, &block.attention, &input, layouts, kept)?;
    let out = &block.attention.out;
    if block.attention_post_norm.is_none() && block.attention_scale.is_none() {
        ops.add_linear(x, &attended, out)?;
    } else {
        let output = ops.linear(&attended, out)?;
        add_scaled(ops, x, output, block.attention_post_norm.as_ref(), block.attention_scale.as_ref())?;
    }
    let input = ops.norm(x, &block.feed_forward_norm)?;
    if block.feed_forward_post_norm.is_none() && block.feed_forward_scale.is_none() {
        ops.add_feed_forward(x, &input, &block.feed_forward)?;
    } else {
        let output = ops.feed_forward(&input, &block.feed_forward)?;
        add_scaled(ops, x, output, block.feed_forward_post_norm.as_ref(), block.feed_forward_scale.as_ref())?;
    }
    if block.output_scale == 1.0 { Ok(()) } else { ops.scale(x, block.output_scale) }
}

/// `x += scale * norm(output)`
fn add_scaled<O: EncoderOps>(
    ops: &mut O,
    x: &mut O::Rows,
    mut output: O::Rows,
    norm: Option<&EncoderNorm<O::Types>>,
    scale: Option<&<O::Types as EncoderTypes>::Vector>,
) -> Result<(), O::Error> {
    if let Some(norm) = norm {
        output = ops.norm(&output, norm)?;
    }
    if let Some(factors) = scale {
        ops.scale_columns(&mut output, factors)?;
    }
    ops.add(x, &output)
}

/// Attention of `x` without its output projection.
fn attend<O: EncoderOps>(
    ops: &mut O,
    attention: &EncoderAttention<O::Types>,
    x: &O::Rows,
    layouts: &[Layout],
    kept: &mut KeptRows<O::Rows>,
) -> Result<O::Rows, O::Error> {
    let [mut q, mut k, mut v] = ops.projections(x, [&attention.q, &attention.k, &attention.v])?;
    for (rows, norm) in [(&mut q, &attention.q_norm), (&mut k, &attention.k_norm), (&mut v, &attention.v_norm)] {
        if let Some(norm) = norm {
            *rows = ops.norm(rows, norm)?;
        }
    }
    if let Some(angles) = &attention.rope {
        let of = KeptOf::Angles(angles.clone());
        let table = kept.rows(ops, of, layouts, attention.head_dim, |layout| angles.table(layout))?;
        ops.rotate(&mut q, table, attention.head_dim, angles.block)?;
        ops.rotate(&mut k, table, attention.head_dim, angles.block)?;
    }
    if !attention.relative.is_empty() {
        return attend_by_distance(ops, attention, [&q, &k, &v], layouts);
    }
    let (mut segments, mut first) = (Vec::new(), 0);
    for layout in layouts {
        let start = first;
        if attention.causal_others {
            first += layout.places.len();
            let patches = start..start + layout.n_patches();
            segments.push(AttentionSegment { queries: patches.clone(), keys: patches.clone() });
            let others = patches.end..first;
            segments.extend(others.map(|row| AttentionSegment { queries: row..row + 1, keys: start..row + 1 }));
            continue;
        }
        for n in layout.windows(attention.window) {
            let rows = first..first + n;
            first += n;
            segments.push(AttentionSegment { queries: rows.clone(), keys: rows });
        }
    }
    ops.attention(&q, &k, &v, attention.head_dim, attention.scale, &segments)
}

/// Attention of the rows to keys and values that stages make of them.
fn run_query_attention<O: EncoderOps>(
    ops: &mut O,
    kept: &mut KeptRows<O::Rows>,
    attention: &QueryAttention<O::Types>,
    x: &O::Rows,
    layouts: &[Layout],
) -> Result<O::Rows, O::Error> {
    let q = ops.linear(x, &attention.q)?;
    let mut of = |stages: &[Stage<O::Types>]| {
        let copy = State { rows: ops.copy(x)?, layouts: layouts.to_vec() };
        run_stages(ops, kept, stages, copy)
    };
    let (k, v) = (of(&attention.k)?, of(&attention.v)?);
    let (mut first, mut first_key) = (0, 0);
    let segments = layouts.iter().zip(&k.layouts).map(|(queries, keys)| {
        let segment = AttentionSegment {
            queries: first..first + queries.places.len(),
            keys: first_key..first_key + keys.places.len(),
        };
        (first, first_key) = (segment.queries.end, segment.keys.end);
        segment
    });
    let segments: Vec<_> = segments.collect();
    let scale = 1.0 / (attention.head_dim as f32).sqrt();
    let attended = ops.attention(&q, &k.rows, &v.rows, attention.head_dim, scale, &segments)?;
    ops.linear(&attended, &attention.out)
}

/// Attention of learned queries to the rows of each picture.
fn run_resampler<O: EncoderOps>(
    ops: &mut O,
    kept: &mut KeptRows<O::Rows>,
    resampler: &Resampler<O::Types>,
    x: &O::Rows,
    layouts: &mut [Layout],
) -> Result<O::Rows, O::Error> {
    let projected = ops.linear(x, &resampler.input)?;
    let values = ops.norm(&projected, &resampler.input_norm)?;
    let width = ops.width(&values);
    let mut keys = ops.copy(&values)?;
    let positions = kept.rows(ops, KeptOf::Sinusoids(width), layouts, width, |layout| sinusoids(layout, width))?;
    ops.add(&mut keys, positions)?;
    let n_queries = resampler.queries.len() / width;
    let n_pictures = layouts.len();
    let queries = ops.upload([n_pictures * n_queries, width], || resampler.queries.repeat(n_pictures))?;
    let q = ops.linear(&queries, &resampler.q)?;
    let k = ops.linear(&keys, &resampler.k)?;
    let v = ops.linear(&values, &resampler.v)?;
    let (mut segments, mut first) = (Vec::new(), 0);
    for (i, layout) in layouts.iter_mut().enumerate() {
        let keys = first..first + layout.places.len();
        first = keys.end;
        segments.push(AttentionSegment { queries: i * n_queries..(i + 1) * n_queries, keys });
        *layout = Layout::grid(n_queries, 1);
    }
    let scale = 1.0 / (resampler.head_dim as f32).sqrt();
    let attended = ops.attention(&q, &k, &v, resampler.head_dim, scale, &segments)?;
    ops.linear(&attended, &resampler.out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_are_cut_from_normalised_pixels() {
        let colours = Colours { mean: [0.5, 0.0, 0.2], std: [0.5, 1.0, 0.4] };
        let expected = [[-1.0, 0.2, 2.0], [1.0, 0.0, 0.5]];
        let pixels = [[0, 51, 255], [255, 0, 102]];
        // Two patches of 2 x 2 pixels beside each other, and pixels beyond them: pixel i of the picture is `pixels[i % 2]`.
        let rgb: Vec<u8> = (0..5 * 3).flat_map(|i| pixels[i % 2]).collect();
        let pictures = [Pixels { rgb: &rgb, width: 5, height: 3 }];
        let close = |got: Vec<f32>, expected: Vec<f32>| {
            assert_eq!(got.len(), expected.len());
            assert!(
                got.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-6),
                "{got:?}, not {expected:?}"
            );
        };
        let of_patch = [[0, 1, 5, 6], [2, 3, 7, 8]];
        let patch = |order| PatchSpec { side: 2, order };
        let by_pixel = of_patch.iter().flatten().flat_map(|i| expected[i % 2]).collect();
        close(patch(PatchOrder::PixelFirst).cut(colours, &pictures), by_pixel);
        let of_colour = |patch: &[usize; 4], c: usize| patch.map(|i| expected[i % 2][c]);
        let by_colour = of_patch.iter().flat_map(|patch| (0..3).flat_map(|c| of_colour(patch, c))).collect();
        close(patch(PatchOrder::ColourFirst).cut(colours, &pictures), by_colour);
    }
}
