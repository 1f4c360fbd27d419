//! [`VisionModel`]: what an `mmproj` file has, from the pixels of a picture to its place in a prompt.

use metal_attention_pictures::{Filter, Layout, Place, Preprocessing};

use super::stages::{Encoder, FileWeights, Stage};

/// A picture encoder with its preprocessing, and how its rows stand in a prompt.
pub struct VisionModel {
    /// How a picture becomes the pictures that the encoder reads.
    pub preprocessing: Preprocessing,
    /// The encoder.
    pub encoder: Encoder<FileWeights>,
    /// The text around rows.
    pub markers: PictureMarkers,
    /// What rows attend to.
    pub attention: PictureAttention,
    /// Whether rows stand at the positions of their grid in a text model whose RoPE has sections. Otherwise such a text model is refused:
    /// there are rows beside the grid.
    pub has_grid_positions: bool,
}

/// How the rows of a picture attend to each other in the text model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PictureAttention {
    /// As text, to those before.
    Causal,
    /// To all rows of their picture, in all layers (Gemma 3).
    Bidirectional,
    /// To all rows of their picture in layers with a sliding window, otherwise as text (Gemma 4).
    BidirectionalInWindows,
}

/// The text around the rows of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PictureMarkers {
    /// Texts before and behind all rows: the first pair whose first text is a token of the vocabulary, otherwise the last.
    pub around: &'static [[&'static str; 2]],
    /// The text between tiles.
    pub tiles: TileMarkers,
}

/// The text between the tiles of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TileMarkers {
    /// None.
    None,
    /// Idefics 3: row and column before each tile.
    Idefics3,
    /// LFM2-VL: row and column before each tile; nothing around a picture without tiles.
    Lfm2,
    /// MiniCPM-V 2.5: the slices together in one pair of markers.
    MiniCpm25,
    /// MiniCPM-V 2.6 and later: each slice in a pair of markers.
    MiniCpm26,
}

/// A part of a picture's place in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptPart {
    /// Text, in which special tokens count.
    Text(String),
    /// The token of this text; nothing if the vocabulary has none.
    Token(&'static str),
    /// The rows of the entry with this index.
    Rows(usize),
}

impl PictureMarkers {
    /// The parts of a picture whose entries have these places, with `columns` columns of tiles. `has_token`: whether a text is a
    /// token of the vocabulary.
    pub fn parts(&self, places: &[Place], columns: usize, has_token: impl Fn(&str) -> bool) -> Vec<PromptPart> {
        use PromptPart::{Rows, Text, Token};
        let has_tiles = columns > 0;
        let known = self.around.iter().find(|[begin, _]| has_token(begin)).or(self.around.last());
        let [begin, end] = known.copied().unwrap_or_default();
        let mut parts = Vec::new();
        parts.push(Text(begin.to_owned()));
        for (i, &place) in places.iter().enumerate() {
            let (before, after) = match (self.tiles, place) {
                (TileMarkers::None, Place::Whole | Place::Tile { .. }) => (Vec::new(), Vec::new()),
                (TileMarkers::Idefics3, Place::Tile { row, column }) => {
                    let position = format!("<fake_token_around_image><row_{}_col_{}>", row + 1, column + 1);
                    // Behind each row of tiles but the last, which the whole picture follows.
                    let ends = column + 1 == columns && matches!(places.get(i + 1), Some(Place::Tile { .. }));
                    (vec![Text(position)], if ends { vec![Token("\n")] } else { Vec::new() })
                }
                (TileMarkers::Idefics3, Place::Whole) => (
                    vec![Token("\n\n"), Token("<fake_token_around_image>"), Token("<global-img>")],
                    vec![Token("<fake_token_around_image>")],
                ),
                (TileMarkers::Lfm2, Place::Tile { row, column }) => {
                    (vec![Text(format!("<|img_row_{}_col_{}|>", row + 1, column + 1))], Vec::new())
                }
                (TileMarkers::Lfm2, Place::Whole) => {
                    (if has_tiles { vec![Token("<|img_thumbnail|>")] } else { Vec::new() }, Vec::new())
                }
                (TileMarkers::MiniCpm25 | TileMarkers::MiniCpm26, Place::Whole) => {
                    (vec![Token("<image>")], vec![Token("</image>")])
                }
                (TileMarkers::MiniCpm25, Place::Tile { row, column }) => {
                    let mut before = Vec::new();
                    if (row, column) == (0, 0) {
                        before.push(Token("<slice>"));
                    } else if column == 0 {
                        before.push(Token("\n"));
                    }
                    before.push(Token("<image>"));
                    let mut after = vec![Token("</image>")];
                    after.extend((i + 1 == places.len()).then_some(Token("</slice>")));
                    (before, after)
                }
                (TileMarkers::MiniCpm26, Place::Tile { row, column }) => {
                    let mut before = Vec::new();
                    if row > 0 && column == 0 {
                        before.push(Token("\n"));
                    }
                    before.push(Token("<slice>"));
                    (before, vec![Token("</slice>")])
                }
            };
            parts.extend(before);
            parts.push(Rows(i));
            parts.extend(after);
        }
        parts.push(Text(end.to_owned()));
        parts.retain(|part| *part != Text(String::new()));
        parts
    }
}

impl VisionModel {
    /// A model with bicubic resizing, black beside fitted pictures, no markers, and causal attention.
    pub(crate) fn new(encoder: Encoder<FileWeights>, layout: Layout) -> Self {
        let has = |wanted: fn(&Stage<FileWeights>) -> bool| encoder.stages.iter().any(wanted);
        let has_others =
            has(|stage| matches!(stage, Stage::Others { .. })) && !has(|stage| matches!(stage, Stage::DropOthers));
        let has_grid_positions =
            !has_others && !has(|stage| matches!(stage, Stage::RowBreaks { .. } | Stage::Separator { .. }));
        Self {
            preprocessing: Preprocessing { layout, filter: Filter::Bicubic, fill: [0; 3] },
            encoder,
            markers: PictureMarkers { around: &[], tiles: TileMarkers::None },
            attention: PictureAttention::Causal,
            has_grid_positions,
        }
    }

    /// With another filter.
    pub(crate) fn with_filter(mut self, filter: Filter) -> Self {
        self.preprocessing.filter = filter;
        self
    }

    /// With another colour beside fitted pictures.
    pub(crate) fn with_fill(mut self, fill: [u8; 3]) -> Self {
        self.preprocessing.fill = fill;
        self
    }

    /// With texts around the rows.
    pub(crate) fn with_markers(mut self, around: &'static [[&'static str; 2]]) -> Self {
        self.markers.around = around;
        self
    }

    /// With texts between tiles.
    pub(crate) fn with_tiles(mut self, tiles: TileMarkers) -> Self {
        self.markers.tiles = tiles;
        self
    }

    /// With another attention.
    pub(crate) fn with_attention(mut self, attention: PictureAttention) -> Self {
        self.attention = attention;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(markers: PictureMarkers, places: &[Place], columns: usize) -> String {
        let show = |part: PromptPart| match part {
            PromptPart::Text(text) => text,
            PromptPart::Token(text) => format!("{text:?}"),
            PromptPart::Rows(i) => format!("[{i}]"),
        };
        markers.parts(places, columns, |text| text == "<known>").into_iter().map(show).collect()
    }

    #[test]
    fn tiles_and_the_whole_stand_between_their_markers() {
        let tile = |row, column| Place::Tile { row, column };
        let around = &[["<img>", "</img>"]];
        let of = |tiles, places: &[Place], columns| shown(PictureMarkers { around, tiles }, places, columns);
        let tiles = [tile(0, 0), tile(0, 1), tile(1, 0), tile(1, 1), Place::Whole];
        let whole_first = [Place::Whole, tile(0, 0), tile(1, 0)];
        assert_eq!(of(TileMarkers::None, &tiles, 2), "<img>[0][1][2][3][4]</img>");
        assert_eq!(
            of(TileMarkers::Idefics3, &tiles, 2),
            "<img><fake_token_around_image><row_1_col_1>[0]<fake_token_around_image><row_1_col_2>[1]\"\\n\"\
             <fake_token_around_image><row_2_col_1>[2]<fake_token_around_image><row_2_col_2>[3]\
             \"\\n\\n\"\"<fake_token_around_image>\"\"<global-img>\"[4]\"<fake_token_around_image>\"</img>"
        );
        assert_eq!(of(TileMarkers::Lfm2, &[Place::Whole], 0), "<img>[0]</img>");
        assert_eq!(
            of(TileMarkers::Lfm2, &[tile(0, 0), tile(0, 1), Place::Whole], 2),
            "<img><|img_row_1_col_1|>[0]<|img_row_1_col_2|>[1]\"<|img_thumbnail|>\"[2]</img>"
        );
        assert_eq!(
            of(TileMarkers::MiniCpm26, &whole_first, 1),
            "<img>\"<image>\"[0]\"</image>\"\"<slice>\"[1]\"</slice>\"\"\\n\"\"<slice>\"[2]\"</slice>\"</img>"
        );
        assert_eq!(
            of(TileMarkers::MiniCpm25, &whole_first, 1),
            "<img>\"<image>\"[0]\"</image>\"\"<slice>\"\"<image>\"[1]\"</image>\"\"\\n\"\"<image>\"[2]\"</image>\"\"</slice>\"</img>"
        );
    }

    #[test]
    fn markers_are_those_that_the_vocabulary_has() {
        let whole = [Place::Whole];
        let tiles = TileMarkers::None;
        assert_eq!(
            shown(PictureMarkers { around: &[["<known>", "</known>"], ["<a>", "</a>"]], tiles }, &whole, 0),
            "<known>[0]</known>"
        );
        assert_eq!(
            shown(PictureMarkers { around: &[["<b>", "</b>"], ["<a>", "</a>"]], tiles }, &whole, 0),
            "<a>[0]</a>"
        );
        assert_eq!(shown(PictureMarkers { around: &[["", "[END]"]], tiles }, &whole, 0), "[0][END]");
        assert_eq!(shown(PictureMarkers { around: &[], tiles }, &whole, 0), "[0]");
    }
}
