//! Attention with scores by the distance of a key ([`RelativeScores`](super::RelativeScores)), as attention with longer heads: a query is
//! followed by its scores of each row and of each column of the grid, and a key by a one in the places of its own row and column.

use super::geometry::{Layout, NO_ROW, Place};
use super::ops::{AttentionSegment, EncoderOps};
use super::stages::{EncoderAttention, EncoderTypes, RelativeScores};

/// Elements of a head are made a multiple of this.
const HEAD_MULTIPLE: usize = 16;

/// Attention without its output projection, `[n_rows, width]`, of queries, keys and values, `[n_rows, width]`. `attention` has relative
/// scores; a grid of a size that they lack gets those of the last one, with distances beyond them cut.
pub(super) fn attend_by_distance<O: EncoderOps>(
    ops: &mut O,
    attention: &EncoderAttention<O::Types>,
    [q, k, v]: [&O::Rows; 3],
    layouts: &[Layout],
) -> Result<O::Rows, O::Error> {
    let groups: Vec<&[Layout]> = layouts.chunk_by(|a, b| (a.nx, a.ny) == (b.nx, b.ny)).collect();
    let (mut attended, mut first) = (None, 0);
    for group in &groups {
        let n_rows = group.iter().map(|layout| layout.places.len()).sum::<usize>() as u32;
        let Some(scores) = scores_of(&attention.relative, group) else {
            first += n_rows;
            continue;
        };
        let of_group = if groups.len() == 1 {
            attend_alike(ops, attention, scores, [q, k, v], group)?
        } else {
            let rows: Vec<u32> = (first..first + n_rows).collect();
            let (q, k, v) = (ops.gather(q, &rows)?, ops.gather(k, &rows)?, ops.gather(v, &rows)?);
            attend_alike(ops, attention, scores, [&q, &k, &v], group)?
        };
        first += n_rows;
        attended = Some(match attended {
            Some(before) => ops.join_rows(&before, &of_group)?,
            None => of_group,
        });
    }
    match attended {
        Some(attended) => Ok(attended),
        None => ops.copy(v),
    }
}

/// Elements of a head of `head_dim` elements with its scores for a grid of `side` x `side` patches.
fn longer_head(head_dim: usize, side: usize) -> usize {
    (head_dim + 2 * side).next_multiple_of(HEAD_MULTIPLE)
}

impl<T: EncoderTypes> EncoderAttention<T> {
    /// Elements of the longest head that backends get in [`EncoderOps::attention`]: longer than `head_dim` if there are relative scores.
    pub fn longest_head(&self) -> usize {
        let longer = self.relative.iter().map(|scores| longer_head(self.head_dim, scores.side));
        longer.max().unwrap_or(self.head_dim)
    }
}

/// The scores for the grids of `group`, which are alike; `None` if there are none at all.
fn scores_of<'a, T: EncoderTypes>(
    relative: &'a [RelativeScores<T>],
    group: &[Layout],
) -> Option<&'a RelativeScores<T>> {
    let is_side = |scores: &&RelativeScores<T>| group.first().is_some_and(|layout| layout.nx == scores.side);
    relative.iter().find(is_side).or(relative.last())
}

/// Attention of grids that are alike.
fn attend_alike<O: EncoderOps>(
    ops: &mut O,
    attention: &EncoderAttention<O::Types>,
    scores: &RelativeScores<O::Types>,
    [q, k, v]: [&O::Rows; 3],
    layouts: &[Layout],
) -> Result<O::Rows, O::Error> {
    let (n_head, head_dim, side) = (attention.n_head, attention.head_dim, scores.side);
    let distances = 2 * side - 1;
    let longer = longer_head(head_dim, side);
    let added = longer - head_dim;
    let places = || layouts.iter().flat_map(|layout| &layout.places);
    let heads_of = |ops: &mut O, rows: &O::Rows| {
        let rows = ops.copy(rows)?;
        Ok::<_, O::Error>(ops.reshape(rows, head_dim))
    };

    // Each head's scores of all distances, then of each row and column of the grid: [n_rows * n_head, added].
    let queries = heads_of(ops, q)?;
    let by_distance = ops.linear(&queries, &scores.matrix)?;
    let by_distance = ops.reshape(by_distance, 1);
    let mut chosen = Vec::new();
    for (i, (place, _)) in places().flat_map(|place| (0..n_head).map(move |head| (place, head))).enumerate() {
        let start = i * 2 * distances;
        let of_axis = |at: usize, start: usize| {
            (0..side).map(move |key| (start + (at + side - 1).saturating_sub(key).min(distances - 1)) as u32)
        };
        match *place {
            Place::Patch { y, x } => {
                chosen.extend(of_axis(y as usize, start));
                chosen.extend(of_axis(x as usize, start + distances));
            }
            Place::Class | Place::Break => chosen.extend(std::iter::repeat_n(NO_ROW, 2 * side)),
        }
        chosen.extend(std::iter::repeat_n(NO_ROW, added - 2 * side));
    }
    let chosen = ops.gather(&by_distance, &chosen)?;
    let chosen = ops.reshape(chosen, added);
    let queries = ops.join_columns(&[&queries, &chosen])?;
    let queries = ops.reshape(queries, n_head * longer);

    // A one, divided by the scale of all products, in the places of a key's row and column.
    let ones = || {
        let mut ones = Vec::with_capacity(places().count() * added);
        for place in places() {
            let start = ones.len();
            ones.resize(start + added, 0.0);
            if let Place::Patch { y, x } = *place {
                for at in [(y as usize).min(side - 1), side + (x as usize).min(side - 1)] {
                    ones[start + at] = 1.0 / attention.scale;
                }
            }
        }
        ones
    };
    let n_rows = places().count() as u32;
    let ones = ops.upload([n_rows as usize, added], ones)?;
    let of_heads: Vec<u32> = (0..n_rows * n_head as u32).map(|i| i / n_head as u32).collect();
    let of_keys = ops.gather(&ones, &of_heads)?;
    let keys = heads_of(ops, k)?;
    let keys = ops.join_columns(&[&keys, &of_keys])?;
    let keys = ops.reshape(keys, n_head * longer);

    let zeros = ops.gather(&ones, &vec![NO_ROW; of_heads.len()])?;
    let values = heads_of(ops, v)?;
    let values = ops.join_columns(&[&values, &zeros])?;
    let values = ops.reshape(values, n_head * longer);

    let mut first = 0;
    let segments: Vec<_> = layouts
        .iter()
        .map(|layout| {
            let rows = first..first + layout.places.len();
            first = rows.end;
            AttentionSegment { queries: rows.clone(), keys: rows }
        })
        .collect();
    let attended = ops.attention(&queries, &keys, &values, longer, attention.scale, &segments)?;

    // The elements of values alone.
    let unit = greatest_common_divisor(head_dim, added);
    let (of_head, of_longer) = ((head_dim / unit) as u32, (longer / unit) as u32);
    let attended = ops.reshape(attended, unit);
    let elements = (0..n_rows * n_head as u32).flat_map(|head| (0..of_head).map(move |i| head * of_longer + i));
    let attended = ops.gather(&attended, &elements.collect::<Vec<_>>())?;
    Ok(ops.reshape(attended, n_head * head_dim))
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
