//! [`Encoder::run`]: the stages of an encoder over the pixels of pictures, written once for all backends.

use super::geometry::{Layout, MergeOrder, NO_ROW, Place};
use super::ops::{AttentionSegment, EncoderOps};
use super::positions::Angles;
use super::relative::attend_by_distance;
use super::stages::{
    Block, Encoder, EncoderAttention, EncoderFeedForward, PatchOrder, PatchSpec, QueryAttention, Resampler, Stage,
};

/// The pixels of a picture whose sides are whole patches.
#[derive(Debug, Clone, Copy)]
pub struct Pixels<'a> {
    /// Normalised values, `[height, width, 3]`.
    pub values: &'a [f32],
    /// Pixels of a row.
    pub width: usize,
    /// Rows of pixels.
    pub height: usize,
}

/// The rows of embeddings of a picture.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedPicture {
    /// `[n_rows, (1 + n_deepstack) * n_embd]`: each row's embedding, then what is added to it after the first layers.
    pub rows: Vec<f32>,
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
    /// The patches of a picture, row by row, `[ny * nx, 3 * side * side]`. Pixels beyond whole patches are left out.
    fn cut(self, pixels: Pixels<'_>) -> Vec<f32> {
        let Self { side, order } = self;
        let (nx, ny) = (pixels.width / side, pixels.height / side);
        let mut rows = Vec::with_capacity(3 * nx * ny * side * side);
        for (y, x) in (0..nx * ny).map(|i| (i / nx * side, i % nx * side)) {
            let row = |v: usize| &pixels.values[3 * ((y + v) * pixels.width + x)..][..3 * side];
            match order {
                PatchOrder::PixelFirst => (0..side).for_each(|v| rows.extend_from_slice(row(v))),
                PatchOrder::ColourFirst => {
                    for (colour, v) in (0..3 * side).map(|i| (i / side, i % side)) {
                        rows.extend(row(v).iter().skip(colour).step_by(3));
                    }
                }
            }
        }
        rows
    }
}

impl<T: super::EncoderTypes> Encoder<T> {
    /// Encodes pictures, all together. Each may have a size of its own, of at least one patch.
    ///
    /// # Errors
    ///
    /// Those of `ops`.
    pub fn run<O: EncoderOps<Types = T>>(
        &self,
        ops: &mut O,
        pictures: &[Pixels<'_>],
    ) -> Result<Vec<EncodedPicture>, O::Error> {
        let side = self.patch.side;
        let patches: Vec<f32> = pictures.iter().flat_map(|&pixels| self.patch.cut(pixels)).collect();
        let layouts = pictures.iter().map(|pixels| Layout::grid(pixels.width / side, pixels.height / side)).collect();
        let state = State { rows: ops.upload(&patches, 3 * side * side)?, layouts };
        let state = run_stages(ops, &self.stages, state)?;
        let width = (1 + self.n_deepstack) * self.n_embd;
        let rows = ops.read(&state.rows)?;
        if let [Layout { nx, ny, .. }] = state.layouts[..] {
            return Ok(vec![EncodedPicture { rows, nx, ny }]);
        }
        let mut rest = &rows[..];
        let pictures = state.layouts.iter().map(|layout| {
            let (rows, after) = rest.split_at(layout.places.len() * width);
            rest = after;
            EncodedPicture { rows: rows.to_vec(), nx: layout.nx, ny: layout.ny }
        });
        Ok(pictures.collect())
    }
}

/// Runs `stages` over `state`.
pub(super) fn run_stages<O: EncoderOps>(
    ops: &mut O,
    stages: &[Stage<O::Types>],
    state: State<O::Rows>,
) -> Result<State<O::Rows>, O::Error> {
    let State { mut rows, mut layouts } = state;
    let mut features = Vec::new();
    let mut rotation = None;
    for stage in stages {
        match stage {
            Stage::Linear(linear) => rows = ops.linear(&rows, linear)?,
            Stage::Norm(norm) => rows = ops.norm(&rows, norm)?,
            Stage::Activation(activation) => ops.activate(&mut rows, *activation)?,
            Stage::Scale(factor) => ops.scale(&mut rows, *factor)?,
            Stage::ScaleColumns(factors) => ops.scale_columns(&mut rows, factors)?,
            Stage::AddRow(row) => ops.add_row(&mut rows, row)?,
            Stage::Positions(table) => {
                let positions: Vec<f32> = layouts.iter().flat_map(|layout| table.of(layout)).collect();
                let positions = ops.upload(&positions, table.width)?;
                ops.add(&mut rows, &positions)?;
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
            Stage::Block(block) => run_block(ops, block, &mut rows, &layouts, &mut rotation)?,
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
            Stage::QueryAttention(attention) => rows = run_query_attention(ops, attention, &rows, &layouts)?,
            Stage::FeedForward(feed_forward) => rows = run_feed_forward(ops, feed_forward, &rows)?,
            Stage::Attention(attention) => rows = run_attention(ops, attention, &rows, &layouts, &mut rotation)?,
            Stage::Sum([first, second]) => {
                let copy = State { rows: ops.copy(&rows)?, layouts: layouts.clone() };
                let second = run_stages(ops, second, copy)?;
                State { rows, layouts } = run_stages(ops, first, State { rows, layouts })?;
                ops.add(&mut rows, &second.rows)?;
            }
            Stage::Windows { side, stages } => rows = run_windows(ops, *side, stages, &rows, &layouts)?,
            Stage::Squares(stages) => State { rows, layouts } = run_squares(ops, stages, State { rows, layouts })?,
            Stage::Separator { row, ny } => {
                let insert = |layout: &Layout| {
                    if layout.ny == *ny { vec![(layout.places.len(), 0)] } else { Vec::new() }
                };
                rows = insert_rows(ops, &rows, row, Place::Break, &mut layouts, insert)?;
            }
            Stage::Feature(stages) => {
                let copy = State { rows: ops.copy(&rows)?, layouts: layouts.clone() };
                features.push(run_stages(ops, stages, copy)?.rows);
            }
            Stage::JoinFeatures { with_rows } => {
                let first = with_rows.then_some(&rows);
                let parts: Vec<_> = first.into_iter().chain(&features).collect();
                rows = ops.join_columns(&parts)?;
                features.clear();
            }
            Stage::Resampler(resampler) => rows = run_resampler(ops, resampler, &rows, &mut layouts)?,
        }
    }
    Ok(State { rows, layouts })
}

/// Runs `stages` over windows of `side` x `side` patches.
fn run_windows<O: EncoderOps>(
    ops: &mut O,
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
    let state = run_stages(ops, stages, state)?;
    ops.gather(&state.rows, &back)
}

/// Runs `stages` over the squares of which pictures consist, and puts the results beside each other.
fn run_squares<O: EncoderOps>(
    ops: &mut O,
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
    let State { rows, layouts } = run_stages(ops, stages, State { rows: state.rows, layouts: squares })?;
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
    let new = ops.upload(new, ops.width(rows))?;
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

/// The table by which blocks rotate queries and keys. Most blocks of an encoder have the same.
struct Rotation<R> {
    angles: Angles,
    layouts: Vec<Layout>,
    table: R,
}

/// Runs a transformer block over the residual stream `x`. `rotation` keeps the table of the last block that rotates.
fn run_block<O: EncoderOps>(
    ops: &mut O,
    block: &Block<O::Types>,
    x: &mut O::Rows,
    layouts: &[Layout],
    rotation: &mut Option<Rotation<O::Rows>>,
) -> Result<(), O::Error> {
    let input = ops.norm(x, &block.attention_norm)?;
    let mut output = run_attention(ops, &block.attention, &input, layouts, rotation)?;
    if let Some(norm) = &block.attention_post_norm {
        output = ops.norm(&output, norm)?;
    }
    if let Some(factors) = &block.attention_scale {
        ops.scale_columns(&mut output, factors)?;
    }
    ops.add(x, &output)?;
    let input = ops.norm(x, &block.feed_forward_norm)?;
    let mut output = run_feed_forward(ops, &block.feed_forward, &input)?;
    if let Some(norm) = &block.feed_forward_post_norm {
        output = ops.norm(&output, norm)?;
    }
    if let Some(factors) = &block.feed_forward_scale {
        ops.scale_columns(&mut output, factors)?;
    }
    ops.add(x, &output)?;
    if block.output_scale == 1.0 { Ok(()) } else { ops.scale(x, block.output_scale) }
}

/// A feed-forward of `x`.
fn run_feed_forward<O: EncoderOps>(
    ops: &mut O,
    feed_forward: &EncoderFeedForward<O::Types>,
    x: &O::Rows,
) -> Result<O::Rows, O::Error> {
    match feed_forward {
        EncoderFeedForward::Plain { up, activation, down } => {
            let mut up = ops.linear(x, up)?;
            ops.activate(&mut up, *activation)?;
            ops.linear(&up, down)
        }
        EncoderFeedForward::Gated { gate, up, activation, down } => {
            let mut gate = ops.linear(x, gate)?;
            let up = ops.linear(x, up)?;
            ops.activate_gated(&mut gate, *activation, &up)?;
            ops.linear(&gate, down)
        }
    }
}

/// Attention of `x`, up to its output projection.
fn run_attention<O: EncoderOps>(
    ops: &mut O,
    attention: &EncoderAttention<O::Types>,
    x: &O::Rows,
    layouts: &[Layout],
    rotation: &mut Option<Rotation<O::Rows>>,
) -> Result<O::Rows, O::Error> {
    let mut heads = Vec::with_capacity(3);
    for (linear, norm) in
        [(&attention.q, &attention.q_norm), (&attention.k, &attention.k_norm), (&attention.v, &attention.v_norm)]
    {
        let projected = ops.linear(x, linear)?;
        heads.push(match norm {
            Some(norm) => ops.norm(&projected, norm)?,
            None => projected,
        });
    }
    let [mut q, mut k, v]: [O::Rows; 3] = heads.try_into().ok().expect("three projections");
    if let Some(angles) = &attention.rope {
        let known = rotation.take().filter(|known| known.angles == *angles && known.layouts == layouts);
        let Rotation { table, .. } = if let Some(known) = known {
            rotation.insert(known)
        } else {
            let table: Vec<f32> = layouts.iter().flat_map(|layout| angles.table(layout)).collect();
            let table = ops.upload(&table, attention.head_dim)?;
            rotation.insert(Rotation { angles: angles.clone(), layouts: layouts.to_vec(), table })
        };
        ops.rotate(&mut q, table, attention.head_dim, angles.block)?;
        ops.rotate(&mut k, table, attention.head_dim, angles.block)?;
    }
    if !attention.relative.is_empty() {
        let attended = attend_by_distance(ops, attention, [&q, &k, &v], layouts)?;
        return ops.linear(&attended, &attention.out);
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
    let attended = ops.attention(&q, &k, &v, attention.head_dim, attention.scale, &segments)?;
    ops.linear(&attended, &attention.out)
}

/// Attention of the rows to keys and values that stages make of them.
fn run_query_attention<O: EncoderOps>(
    ops: &mut O,
    attention: &QueryAttention<O::Types>,
    x: &O::Rows,
    layouts: &[Layout],
) -> Result<O::Rows, O::Error> {
    let q = ops.linear(x, &attention.q)?;
    let mut of = |stages: &[Stage<O::Types>]| {
        let copy = State { rows: ops.copy(x)?, layouts: layouts.to_vec() };
        run_stages(ops, stages, copy)
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
    resampler: &Resampler<O::Types>,
    x: &O::Rows,
    layouts: &mut [Layout],
) -> Result<O::Rows, O::Error> {
    let projected = ops.linear(x, &resampler.input)?;
    let values = ops.norm(&projected, &resampler.input_norm)?;
    let width = ops.width(&values);
    let positions: Vec<f32> = layouts.iter().flat_map(|layout| sinusoids(layout, width)).collect();
    let mut keys = ops.copy(&values)?;
    let positions = ops.upload(&positions, width)?;
    ops.add(&mut keys, &positions)?;
    let n_queries = resampler.queries.len() / width;
    let queries = ops.upload(&resampler.queries.repeat(layouts.len()), width)?;
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

/// Positions of patches as sines and cosines, `[n_rows, width]`: sines and cosines of the column, then of the row, each `width / 4`
/// with frequencies `10000^(-j / (width / 4))` (MiniCPM-V's `get_2d_sincos_pos_embed`).
fn sinusoids(layout: &Layout, width: usize) -> Vec<f32> {
    let n = width / 4;
    let frequencies: Vec<f32> = (0..n).map(|j| 10_000_f64.powf(-(j as f64) / n as f64) as f32).collect();
    let of = |place: &Place| {
        let (y, x) = match *place {
            Place::Patch { y, x } => (y as f32, x as f32),
            Place::Class | Place::Break => (0.0, 0.0),
        };
        let mut row = Vec::with_capacity(width);
        for position in [x, y] {
            row.extend(frequencies.iter().map(|f| (position * f).sin()));
            row.extend(frequencies.iter().map(|f| (position * f).cos()));
        }
        row.resize(width, 0.0);
        row
    };
    layout.places.iter().flat_map(of).collect()
}
