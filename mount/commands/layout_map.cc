// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/layout_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>

#include "core/base/printable.h"
#include "core/base/strings.h"
#include "core/view/shard.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMostColumns = 64;
constexpr size_t kMostParameters = 64;  // rows of their own
constexpr size_t kMostRows = 256;
constexpr size_t kMostRuns = 64;
constexpr size_t kNameLetters = 48;
constexpr size_t kNameHead = 18;    // of a longer one: "model.layers.12.ml..gate_up_proj.weight"
constexpr uint64_t kWideCells = 8;  // columns whose fractions are written out

// True if this is one of `shown` places out of `degree`, spread evenly from first to last.
bool IsAmong(uint64_t shown, uint64_t degree, uint64_t place) {
  if (shown >= degree || place == 0) return true;
  if (shown < 2) return false;
  const uint64_t nearest = (place * (shown - 1) + degree - 2) / (degree - 1);
  return nearest * (degree - 1) / (shown - 1) == place;
}

// All ranks, or the first of those that hold the same; never more than kMostColumns.
void ChooseColumns(LayoutMap& map) {
  const Layout& layout = map.layout;
  const uint64_t world = layout.World();
  const bool all = world <= kMostColumns || layout.ep > 1 || layout.etp > 1;
  const uint64_t parts = uint64_t{layout.tp} * layout.pp;
  const uint64_t slices =
      layout.zero == 0 ? 1 : std::clamp<uint64_t>(kMostColumns / parts, 1, layout.dp);
  for (uint64_t rank = 0; rank < world; ++rank) {
    const RankCoordinate at = CoordinateOf(layout, rank);
    if (!all && (at.cp > 0 || !IsAmong(slices, layout.dp, at.dp))) continue;
    map.ranks.push_back(rank);
  }
  if (!all) map.alike = uint64_t{layout.cp} * (layout.zero == 0 ? layout.dp : 1);
  if (!all && layout.zero > 0 && slices < layout.dp) map.slices_shown = slices;
  if (map.ranks.size() <= kMostColumns) return;
  std::vector<uint64_t> some;
  for (uint64_t i = 0; i < kMostColumns; ++i) {
    some.push_back(map.ranks[i * map.ranks.size() / kMostColumns]);
  }
  map.ranks = std::move(some);
}

uint64_t Volume(const Shape& shape) { return ElementCount(shape).value_or(0); }

// Where the piece lies along the dim that is cut.
std::pair<double, double> RunOf(const Piece& piece, const Shape& shape) {
  for (size_t d = 0; d < shape.size(); ++d) {
    if (piece.shape[d] == shape[d] || shape[d] == 0) continue;  // not cut
    const auto size = static_cast<double>(shape[d]);
    return {static_cast<double>(piece.atom_begin[d]) / size,
            static_cast<double>(piece.atom_begin[d] + piece.shape[d]) / size};
  }
  return {0, 1};
}

// The part of the parameter that a rank's local tensor holds.
LayoutMap::Cell CellOf(const LocalTensor& local, const Shape& shape) {
  LayoutMap::Cell cell;
  for (const Piece& piece : local.pieces) {
    cell.elements += Volume(piece.shape);
    if (cell.runs.size() < kMostRuns) cell.runs.push_back(RunOf(piece, shape));
  }
  if (cell.elements == Volume(shape)) cell.runs.clear();
  return cell;
}

// The rank's slice of what it has of the parameter.
LayoutMap::Cell SliceOf(const LocalTensor& local, const Layout& layout, const RankCoordinate& at,
                        const Parameter& parameter) {
  LayoutMap::Cell cell;
  const uint64_t elements = Volume(local.shape);
  const ZeroSlice slice = ZeroSliceOf(layout, at, parameter);
  const auto [begin, end] = ZeroRange(elements, slice.number, slice.degree);
  cell.slice = {std::min(begin, elements), std::min(end, elements)};
  cell.elements = cell.slice.second - cell.slice.first;
  if (cell.elements > 0 && cell.elements < elements) {
    const auto size = static_cast<double>(elements);
    cell.runs.emplace_back(static_cast<double>(cell.slice.first) / size,
                           static_cast<double>(cell.slice.second) / size);
  }
  return cell;
}

Result<LayoutMap::Row> RowOf(const StepModel& step, const LayoutMap& map,
                             const Parameter& parameter, bool slices) {
  LayoutMap::Row row{parameter.name, 1, Volume(parameter.shape), {}};
  for (const uint64_t rank : map.ranks) {
    const RankCoordinate at = CoordinateOf(map.layout, rank);
    CKPT_ASSIGN_OR_RETURN(const bool holds, Holds(step, map.layout, at, parameter));
    if (!holds) {
      row.cells.emplace_back();
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(const auto local, LocalOf(step, map.layout, at, parameter));
    row.cells.push_back(slices ? SliceOf(*local, map.layout, at, parameter)
                               : CellOf(*local, parameter.shape));
  }
  return row;
}

// Parameters of one layer, or of none, become one row.
void Merge(std::vector<LayoutMap::Row>& rows, const Parameter& parameter, LayoutMap::Row row,
           std::map<std::string, size_t>& known) {
  const bool layer = parameter.stage == StageRule::kLayer;
  const std::string name = layer ? StrCat("layer ", parameter.layer) : parameter.name;
  const auto [place, fresh] = known.try_emplace(name, rows.size());
  if (fresh) {
    row.name = name;
    rows.push_back(std::move(row));
    return;
  }
  LayoutMap::Row& into = rows[place->second];
  ++into.parameters;
  into.elements += row.elements;
  for (size_t i = 0; i < row.cells.size(); ++i) {
    LayoutMap::Cell& cell = into.cells[i];
    if (cell.runs.empty()) cell.runs = std::move(row.cells[i].runs);
    if (cell.elements == 0) cell.slice = row.cells[i].slice;
    cell.elements += row.cells[i].elements;
  }
}

std::string Fraction(const LayoutMap::Row& row, const LayoutMap::Cell& cell) {
  if (cell.elements == 0) return ".";
  if (cell.elements == row.elements) return "all";
  const uint64_t divisor = std::gcd(cell.elements, row.elements);
  const uint64_t below = row.elements / divisor;
  if (below <= 99) return StrCat(cell.elements / divisor, "/", below);
  return fmt::format(
      "{:.0f}%", 100.0 * static_cast<double>(cell.elements) / static_cast<double>(row.elements));
}

std::string ShortName(const LayoutMap::Row& row) {
  std::string name = Printable(row.name);
  if (row.parameters > 1) name += StrCat(" (", row.parameters, ")");
  if (name.size() > kNameLetters) {
    const size_t tail = kNameLetters - kNameHead - 2;
    name = StrCat(name.substr(0, kNameHead), "..", name.substr(name.size() - tail));
  }
  return name;
}

std::string CoordinateText(const Layout& layout, uint64_t rank) {
  const RankCoordinate at = CoordinateOf(layout, rank);
  std::string text;
  const auto add = [&](const char* name, uint32_t degree, uint32_t place) {
    if (degree > 1) text += StrCat(text.empty() ? "" : " ", name, place);
  };
  add("tp", layout.tp, at.tp);
  add("cp", layout.cp, at.cp);
  add("dp", layout.dp, at.dp);
  add("pp", layout.pp, at.pp);
  add("ep", layout.ep, at.ep);
  return text;
}

std::vector<std::string> Remarks(const LayoutMap& map) {
  std::vector<std::string> lines;
  if (map.alike > 1) {
    lines.push_back(
        StrCat("each rank that is shown stands for ", map.alike, " that hold the same"));
  }
  if (map.slices_shown > 0) {
    lines.push_back(StrCat("there are ", map.layout.dp,
                           " data-parallel "
                           "ranks; ",
                           map.slices_shown, " are shown"));
  }
  if (!map.slices.empty()) {
    lines.push_back(
        StrCat("a slice: the rank's part has n elements, row by row; data-parallel "
               "rank d has",
               " [d*s, d*s+s), s = ceil(n/", map.layout.dp, ")"));
    if (map.layout.ep > 1 || map.layout.etp > 1) {
      lines.emplace_back(
          "experts: d and the number of slices count the ranks that hold the same "
          "experts");
    }
  } else if (map.layout.zero > 0) {
    lines.emplace_back("the step has no optimizer states that ZeRO would slice");
  }
  if (map.rows_left_out > 0) lines.push_back(StrCat(map.rows_left_out, " more rows are not shown"));
  return lines;
}

// The tensor that the slices are cut from.
std::string SlicesTitle(const LayoutMap& map) {
  return StrCat("ZeRO ", map.layout.zero, ": slices of ",
                map.layout.zero == 3 ? "weights and optimizer states" : "optimizer states");
}

std::string_view PartsTitle(const LayoutMap& map) {
  return map.layout.zero == 3 ? "weights: the part that a rank has a slice of" : "weights";
}

constexpr Colour kInk{40, 40, 48};
constexpr Colour kPale{226, 229, 235};
constexpr Colour kWhole{96, 125, 176};
constexpr Colour kHues[] = {{217, 95, 2},   {27, 158, 119}, {117, 112, 179}, {231, 41, 138},
                            {102, 166, 30}, {230, 171, 2},  {166, 118, 29},  {55, 126, 184}};

// Marks the parameters that ZeRO slices: those with states of their shape; at stage 3 all but
// buffers.
std::vector<bool> SlicedParameters(const StepModel& step, const Layout& layout) {
  std::vector<bool> sliced(step.parameters.size());
  if (layout.zero == 0) return sliced;
  for (const Atom& atom : step.atoms) {
    const bool state = atom.kind != "weight" && atom.relation == Relation::kSame;
    if (state) sliced[static_cast<uint32_t>(atom.parameter)] = true;
  }
  for (size_t i = 0; layout.zero == 3 && i < sliced.size(); ++i) {
    sliced[i] = sliced[i] || step.parameters[i].role != Role::kBuffer;
  }
  return sliced;
}

// A row of each parameter, or of each layer where there are many.
Result<std::vector<LayoutMap::Row>> RowsOf(const StepModel& step, LayoutMap& map,
                                           const std::vector<bool>& chosen, bool slices) {
  std::vector<LayoutMap::Row> rows;
  const bool merged = step.parameters.size() > kMostParameters;
  std::map<std::string, size_t> known;
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    const Parameter& parameter = step.parameters[i];
    if (!chosen[i] || !IsOfModel(parameter)) continue;
    CKPT_ASSIGN_OR_RETURN(LayoutMap::Row row, RowOf(step, map, parameter, slices));
    if (merged) {
      Merge(rows, parameter, std::move(row), known);
    } else {
      rows.push_back(std::move(row));
    }
  }
  if (rows.size() > kMostRows) {
    map.rows_left_out += rows.size() - kMostRows;
    rows.resize(kMostRows);
  }
  return rows;
}

}  // namespace

Result<LayoutMap> MapLayout(const StepModel& step, const Layout& layout) {
  CKPT_RETURN_IF_ERROR(CheckLayout(step, layout));
  LayoutMap map;
  map.layout = layout;
  ChooseColumns(map);
  const std::vector<bool> all(step.parameters.size(), true);
  CKPT_ASSIGN_OR_RETURN(map.rows, RowsOf(step, map, all, false));
  CKPT_ASSIGN_OR_RETURN(map.slices, RowsOf(step, map, SlicedParameters(step, layout), true));
  return map;
}

namespace {

// A line per degree above 1: which place each rank has in it.
std::string CoordinateLines(const LayoutMap& map, size_t name_width, size_t cell_width) {
  const Layout& layout = map.layout;
  const std::tuple<const char*, uint32_t, uint32_t RankCoordinate::*> degrees[] = {
      {"tp", layout.tp, &RankCoordinate::tp},
      {"cp", layout.cp, &RankCoordinate::cp},
      {"dp", layout.dp, &RankCoordinate::dp},
      {"pp", layout.pp, &RankCoordinate::pp},
      {"ep", layout.ep, &RankCoordinate::ep}};
  std::string text;
  for (const auto& [name, degree, place] : degrees) {
    if (degree <= 1) continue;
    text += fmt::format("{:<{}}", name, name_width);
    for (const uint64_t rank : map.ranks) {
      text += fmt::format("  {:>{}}", CoordinateOf(layout, rank).*place, cell_width);
    }
    text += "\n";
  }
  return text;
}

std::string RowsText(const std::vector<LayoutMap::Row>& rows, size_t name_width, size_t cell_width,
                     bool wide) {
  std::string text;
  for (const LayoutMap::Row& row : rows) {
    text += fmt::format("{:<{}}", ShortName(row), name_width);
    for (const LayoutMap::Cell& cell : row.cells) {
      const std::string narrow = cell.elements == 0              ? "."
                                 : cell.elements == row.elements ? "#"
                                                                 : "/";
      text += fmt::format("  {:>{}}", wide ? Fraction(row, cell) : narrow, cell_width);
    }
    text += "\n";
  }
  return text;
}

}  // namespace

std::string MapText(const LayoutMap& map) {
  size_t name_width = 4, cell_width = 1;
  const bool wide = map.ranks.size() <= kWideCells;
  for (const LayoutMap::Row& row : map.rows)
    name_width = std::max(name_width, ShortName(row).size());
  if (wide) cell_width = 6;
  for (const uint64_t rank : map.ranks)
    cell_width = std::max(cell_width, std::to_string(rank).size());
  std::string text = StrCat(map.layout.ToString(), ": ", map.layout.World(), " ranks\n");
  text += fmt::format("{:<{}}", "rank", name_width);
  for (const uint64_t rank : map.ranks) text += fmt::format("  {:>{}}", rank, cell_width);
  text += "\n" + CoordinateLines(map, name_width, cell_width);
  if (!map.slices.empty()) text += StrCat("\n", PartsTitle(map), "\n");
  text += RowsText(map.rows, name_width, cell_width, wide);
  if (!map.slices.empty()) {
    text += StrCat("\n", SlicesTitle(map), "\n", RowsText(map.slices, name_width, cell_width, wide),
                   "\n");
  }
  if (!wide) text += "# all of it, / a part, . nothing\n";
  for (const std::string& line : Remarks(map)) text += line + "\n";
  return text;
}

nlohmann::json MapJson(const LayoutMap& map) {
  using Json = nlohmann::json;
  Json columns = Json::array();
  for (const uint64_t rank : map.ranks) {
    const RankCoordinate at = CoordinateOf(map.layout, rank);
    columns.push_back({{"rank", rank},
                       {"tp", at.tp},
                       {"cp", at.cp},
                       {"dp", at.dp},
                       {"pp", at.pp},
                       {"ep", at.ep},
                       {"etp", at.etp}});
  }
  const auto rows_json = [](const std::vector<LayoutMap::Row>& rows, bool slices) {
    Json json = Json::array();
    for (const LayoutMap::Row& row : rows) {
      Json held = Json::array();
      for (const LayoutMap::Cell& cell : row.cells) {
        held.push_back({{"elements", cell.elements}, {"runs", cell.runs}});
        if (slices) held.back()["slice"] = cell.slice;
      }
      json.push_back({{"name", row.name},
                      {"parameters", row.parameters},
                      {"elements", row.elements},
                      {"held", std::move(held)}});
    }
    return json;
  };
  Json json = {{"layout", map.layout.ToString()},    {"world", map.layout.World()},
               {"ranks_alike", map.alike},           {"columns", std::move(columns)},
               {"rows", rows_json(map.rows, false)}, {"rows_left_out", map.rows_left_out}};
  if (map.slices.empty()) return json;
  const bool weights = map.layout.zero == 3;
  json["slices"] = {{"of", weights ? Json{"weights", "optimizer"} : Json{"optimizer"}},
                    {"rows", rows_json(map.slices, true)}};
  return json;
}

namespace {

constexpr int kMargin = 16, kRowHeight = 20, kBar = 17, kFootGap = 6;
constexpr int kScale = 2;  // of letters
constexpr int kLetter = kScale * Picture::kLetterWidth;

// Where things are in the picture.
struct Sheet {
  int names = 0;  // width of the column of names
  int cell = 0;   // width of a rank's
  int head = kMargin + 3 * kRowHeight;
  int X(size_t column) const { return kMargin + names + static_cast<int>(column) * cell; }
  int Y(size_t row) const { return head + static_cast<int>(row) * kRowHeight; }
};

Colour HueOf(const Layout& layout, uint64_t rank) {
  const RankCoordinate at = CoordinateOf(layout, rank);
  return kHues[(layout.ep > 1 && layout.tp == 1 ? at.ep : at.tp) % std::size(kHues)];
}

void DrawHead(Picture& picture, const LayoutMap& map, const Sheet& sheet) {
  picture.Text(kMargin, sheet.head - 28, "rank", kInk, kScale);
  const bool large = sheet.cell >= 28;
  const size_t widest = std::to_string(map.ranks.empty() ? 0 : map.ranks.back()).size() + 1;
  const int number = static_cast<int>(widest) * (large ? kLetter : Picture::kLetterWidth);
  const size_t every = static_cast<size_t>((number + sheet.cell - 1) / sheet.cell);
  for (size_t c = 0; c < map.ranks.size(); c += every) {
    picture.Text(sheet.X(c) + 2, sheet.head - 28, StrCat(map.ranks[c]), kInk, large ? kScale : 1);
    const std::string at = CoordinateText(map.layout, map.ranks[c]);
    const bool fits = static_cast<int>(at.size()) * Picture::kLetterWidth <= sheet.cell;
    if (fits) picture.Text(sheet.X(c) + 2, sheet.head - 10, at, kInk, 1);
  }
}

void DrawCell(Picture& picture, const LayoutMap& map, const Sheet& sheet, const LayoutMap::Row& row,
              size_t column, int y) {
  const LayoutMap::Cell& held = row.cells[column];
  const int x = sheet.X(column), room = sheet.cell - 2;
  const bool whole = held.runs.empty() && held.elements > 0;
  picture.Rectangle(x, y, room, kBar, whole ? kWhole : kPale);
  const Colour hue = HueOf(map.layout, map.ranks[column]);
  for (const auto& [begin, end] : held.runs) {
    const int from = static_cast<int>(begin * room);
    const int wide = std::max(static_cast<int>(end * room) - from, held.runs.size() == 1 ? 2 : 1);
    picture.Rectangle(x + std::min(from, room - wide), y, wide, kBar, hue);
  }
}

void DrawRows(Picture& picture, const LayoutMap& map, const Sheet& sheet,
              const std::vector<LayoutMap::Row>& rows, size_t first) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const int y = sheet.Y(first + i);
    picture.Text(kMargin, y + 2, ShortName(rows[i]), kInk, kScale);
    for (size_t c = 0; c < map.ranks.size(); ++c) DrawCell(picture, map, sheet, rows[i], c, y);
  }
}

void DrawFoot(Picture& picture, const std::vector<std::string>& remarks, int y) {
  picture.Rectangle(kMargin, y, 28, kBar, kWhole);
  picture.Text(kMargin + 36, y + 2, "all of it", kInk, kScale);
  picture.Rectangle(kMargin + 170, y, 28, kBar, kPale);
  picture.Rectangle(kMargin + 170, y, 14, kBar, kHues[0]);
  picture.Text(kMargin + 206, y + 2, "a part, where it lies", kInk, kScale);
  picture.Rectangle(kMargin + 490, y, 28, kBar, kPale);
  picture.Text(kMargin + 526, y + 2, "nothing", kInk, kScale);
  y += kFootGap;
  for (const std::string& line : remarks)
    picture.Text(kMargin, y += kRowHeight, line, kInk, kScale);
}

}  // namespace

Picture DrawMap(const LayoutMap& map, const std::string& title) {
  Sheet sheet;
  sheet.cell = std::clamp(960 / std::max(static_cast<int>(map.ranks.size()), 1), 14, 120);
  size_t longest = 4;
  for (const LayoutMap::Row& row : map.rows) longest = std::max(longest, ShortName(row).size());
  sheet.names = static_cast<int>(longest) * kLetter + 12;
  const std::vector<std::string> remarks = Remarks(map);
  size_t letters = std::max<size_t>(Printable(title).size(), 54);
  for (const std::string& line : remarks) letters = std::max(letters, line.size());
  const int width =
      std::max(sheet.X(map.ranks.size()), kMargin + static_cast<int>(letters) * kLetter);
  const bool sliced = !map.slices.empty();  // then each block of rows has a title
  const size_t first = sliced ? 1 : 0;
  const size_t below = first + map.rows.size() + first;  // the second title, below an empty row
  const int foot = sheet.Y(below + first + map.slices.size()) + 6;
  Picture picture(width + kMargin,
                  foot + static_cast<int>(remarks.size() + 1) * kRowHeight + kFootGap + kMargin);
  picture.Text(kMargin, kMargin, title, kInk, kScale);
  DrawHead(picture, map, sheet);
  DrawRows(picture, map, sheet, map.rows, first);
  if (sliced) {
    picture.Text(kMargin, sheet.Y(0) + 2, PartsTitle(map), kWhole, kScale);
    picture.Text(kMargin, sheet.Y(below) + 2, SlicesTitle(map), kWhole, kScale);
    DrawRows(picture, map, sheet, map.slices, below + 1);
  }
  DrawFoot(picture, remarks, foot);
  return picture;
}

}  // namespace ckptfs
