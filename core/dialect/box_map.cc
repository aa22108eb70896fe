// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/box_map.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/box_index.h"
#include "core/state/assembler.h"

namespace ckptfs {
namespace {

// The flat elements of a local tensor that its pieces touch lie in [first, last].
struct Window {
  uint64_t first = UINT64_MAX;
  uint64_t last = 0;

  void Add(const Piece& piece) {
    uint64_t end = piece.local_offset;
    for (size_t d = 0; d < piece.shape.size(); ++d) {
      end += (piece.shape[d] - 1) * piece.local_strides[d];
    }
    first = std::min(first, piece.local_offset);
    last = std::max(last, end);
  }
};

// The fragments of the series that have an element in the window; nothing if none has.
std::optional<FragmentSeries> CutSeries(FragmentSeries series, const Window& window) {
  if (series.elements == 0 || series.flat_begin > window.last) return std::nullopt;
  const uint64_t step = std::max<uint64_t>(series.flat_step, 1);
  uint64_t low = 0;
  if (series.flat_begin + series.elements <= window.first) {
    low = (window.first - series.elements - series.flat_begin) / step + 1;
  }
  const uint64_t high =
      std::min<uint64_t>(series.count - 1, (window.last - series.flat_begin) / step);
  if (low > high) return std::nullopt;
  const Fragment first = series.At(static_cast<uint32_t>(low));
  series.flat_begin = first.flat_begin;
  series.blob = static_cast<uint32_t>(first.blob);
  series.offset = first.offset;
  series.count = static_cast<uint32_t>(high - low + 1);
  if (series.count == 1) {
    series.flat_step = 0;
    series.blob_step = series.offset_step = 0;
  }
  return series;
}

// The indexes of a dimension of the source among which the box's are.
// REQUIRES: CheckBoxMap succeeds.
uint64_t SpanOf(const BoxMap& map, size_t d) {
  return map.from_extent[d] == 0 ? 0 : (map.from_extent[d] - 1) * map.StepOf(d) + 1;
}

// One copy of the target, box by box.
class Composer {
 public:
  explicit Composer(std::span<const Gather* const> sources) : sources_(sources) {}

  void Add(const BoxMap& map) {
    const Gather& gather = *sources_[map.from];
    const auto cut = [&](const BoxIndex::Entry& at) {
      Cut(map, at, gather.locals[at.local].pieces[at.piece]);
      return true;
    };
    if (gather.index && gather.index->locals() == gather.locals.size()) {
      std::vector<uint64_t> end = map.from_begin;
      for (size_t d = 0; d < end.size(); ++d) end[d] += SpanOf(map, d);
      gather.index->ForEach(map.from_begin, end, cut);
      return;
    }
    for (uint32_t local = 0; local < gather.locals.size(); ++local) {
      const auto pieces = static_cast<uint32_t>(gather.locals[local].pieces.size());
      for (uint32_t piece = 0; piece < pieces; ++piece) cut({local, piece});
    }
  }

  // The local tensors of `others` beside those that were taken of the sources, whole and without
  // pieces.  REQUIRES: one of each source's number, with a fragment for each local tensor.
  Gather Beside(std::span<const Gather* const> others) const {
    Gather out;
    std::map<uint32_t, std::pair<uint32_t, uint32_t>> of;  // by the target's local
    for (const auto& [key, number] : numbers_) of.emplace(number, key);
    for (const auto& [number, key] : of) {
      const auto& [from, local] = key;
      out.locals.push_back(others[from]->locals[local]);
      out.series.push_back(others[from]->series[local]);
      out.series.back().local = number;
    }
    return out;
  }

  Gather Finish() && {
    for (const auto& [key, number] : numbers_) AddSeries(key.first, key.second, number);
    std::ranges::sort(out_.series, {},
                      [](const FragmentSeries& s) { return std::pair(s.local, s.flat_begin); });
    return std::move(out_);
  }

 private:
  // The part of the piece that lies in the map's box, as a piece of the target.
  void Cut(const BoxMap& map, const BoxIndex::Entry& at, const Piece& piece) {
    const size_t rank = map.from_begin.size();
    std::vector<uint64_t> begin(rank), extent(rank);  // indexes of the box
    uint64_t offset = piece.local_offset;
    for (size_t d = 0; d < rank; ++d) {
      const uint64_t step = map.StepOf(d), piece_end = piece.atom_begin[d] + piece.shape[d];
      if (piece_end <= map.from_begin[d]) return;
      const uint64_t low = piece.atom_begin[d] > map.from_begin[d]
                               ? (piece.atom_begin[d] - map.from_begin[d] + step - 1) / step
                               : 0;
      const uint64_t high =
          std::min(map.from_extent[d], (piece_end - map.from_begin[d] + step - 1) / step);
      if (low >= high) return;
      begin[d] = low;
      extent[d] = high - low;
      // No more than the piece's last element, which lies in its local tensor.
      offset += (map.from_begin[d] + low * step - piece.atom_begin[d]) * piece.local_strides[d];
    }
    Piece out;
    out.local_offset = offset;
    out.scale = piece.scale;
    for (size_t d = 0; d < map.axis.size(); ++d) {
      const bool one = map.axis[d] < 0;
      const auto source = static_cast<size_t>(one ? 0 : map.axis[d]);
      out.shape.push_back(one ? 1 : extent[source]);
      out.atom_begin.push_back(map.to_begin[d] + (one ? 0 : begin[source]));
      const uint64_t step = map.StepOf(source);
      // A step has no meaning, and may be any number, where no second index follows.
      const bool still = one || (step > 1 && extent[source] == 1);
      out.local_strides.push_back(still ? 0 : piece.local_strides[source] * step);
    }
    const uint32_t number = NumberOf(map.from, at.local);
    windows_[number].Add(out);
    out_.locals[number].pieces.push_back(std::move(out));
  }

  // The local tensor's number in the target.
  uint32_t NumberOf(uint32_t from, uint32_t local) {
    const auto [found, fresh] =
        numbers_.emplace(std::pair(from, local), static_cast<uint32_t>(out_.locals.size()));
    if (fresh) {
      out_.locals.push_back({sources_[from]->locals[local].shape, {}});
      windows_.emplace_back();
    }
    return found->second;
  }

  void AddSeries(uint32_t from, uint32_t local, uint32_t number) {
    const auto& series = sources_[from]->series;
    for (const FragmentSeries& one :
         std::ranges::equal_range(series, local, {}, &FragmentSeries::local)) {
      if (auto cut = CutSeries(one, windows_[number])) {
        cut->local = number;
        out_.series.push_back(*cut);
      }
    }
  }

  const std::span<const Gather* const> sources_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> numbers_;  // (source, local) -> target's local
  std::vector<Window> windows_;                                // by the target's local
  Gather out_;
};

Result<Gather> Compose(std::span<const Gather* const> copies, std::span<const BoxMap> maps,
                       const Shape& to) {
  Composer composer(copies);
  for (const BoxMap& map : maps) composer.Add(map);
  Gather gather = std::move(composer).Finish();
  CKPT_RETURN_IF_ERROR(ProveCoverage(gather, to));
  return gather;
}

// The k-th copy of each source makes the k-th of the target.
Result<std::vector<Gather>> ComposeCopies(std::span<const Atom* const> sources, size_t copies,
                                          std::span<const BoxMap> maps, const Shape& to) {
  std::vector<Gather> out;
  for (size_t k = 0; k < copies; ++k) {
    std::vector<const Gather*> parts;
    parts.reserve(sources.size());
    for (const Atom* source : sources) parts.push_back(&source->source.gathers[k]);
    CKPT_ASSIGN_OR_RETURN(Gather gather, Compose(parts, maps, to));
    out.push_back(std::move(gather));
  }
  return out;
}

// A gather, replicas of it and, apart from these, the other kinds.
enum class Way { kGathered, kAveraged, kScaled, kInline, kCast };

Way WayOf(const AtomSource& source) {
  switch (source.kind) {
    case SourceKind::kGather:
    case SourceKind::kReplicas: return Way::kGathered;
    case SourceKind::kAverage: return Way::kAveraged;
    case SourceKind::kScaled: return Way::kScaled;
    case SourceKind::kInline: return Way::kInline;
    case SourceKind::kCast: break;
  }
  return Way::kCast;
}

std::string_view NameOf(Way way) {
  switch (way) {
    case Way::kGathered: return "gathered";
    case Way::kAveraged: return "averaged";
    case Way::kScaled: return "decoded";
    case Way::kInline: return "kept as a value";
    case Way::kCast: break;
  }
  return "a cast";
}

tl::unexpected<Error> Cannot(std::string why) {
  return Fail(ErrorCode::kUnsupported, std::move(why));
}

Result<AtomSource> ComposeInline(std::span<const Atom* const> sources, const Shape& to) {
  const Atom& first = *sources.front();
  for (const Atom* one : sources) {
    if (one->source.inline_bytes != first.source.inline_bytes || one->dtype != first.dtype ||
        one->source.python_number != first.source.python_number || one->shape != to) {
      return Cannot("its parts are different values");
    }
  }
  return first.source;
}

Result<AtomSource> ComposeGathered(std::span<const Atom* const> sources,
                                   std::span<const BoxMap> maps, const Shape& to) {
  const size_t copies = sources.front()->source.gathers.size();
  const bool alike = std::ranges::all_of(
      sources, [&](const Atom* one) { return one->source.gathers.size() == copies; });
  CKPT_ASSIGN_OR_RETURN(std::vector<Gather> made,
                        ComposeCopies(sources, alike ? copies : 1, maps, to));
  AtomSource source = ReplicaSource(std::move(made));
  if (source.gathers.size() == 1) source.kind = SourceKind::kGather;
  return source;
}

Result<AtomSource> ComposeAveraged(std::span<const Atom* const> sources,
                                   std::span<const BoxMap> maps, const Shape& to) {
  const size_t copies = sources.front()->source.gathers.size();
  for (const Atom* one : sources) {
    if (one->source.gathers.size() != copies) {
      return Cannot(StrCat("its parts are averages of ", copies, " and of ",
                           one->source.gathers.size(), " copies"));
    }
  }
  CKPT_ASSIGN_OR_RETURN(std::vector<Gather> made, ComposeCopies(sources, copies, maps, to));
  return AverageSource(std::move(made));
}

// Scales stay beside the values' local tensors, whatever boxes of these are taken.
Result<AtomSource> ComposeScaled(std::span<const Atom* const> sources, std::span<const BoxMap> maps,
                                 const Shape& to) {
  std::vector<const Gather*> values, scales;
  for (const Atom* one : sources) {
    if (one->source.block != sources.front()->source.block) {
      return Cannot("its parts have scales for blocks of different sizes");
    }
    values.push_back(&one->source.gathers[0]);
    scales.push_back(&one->source.gathers[1]);
  }
  Composer composer(values);
  for (const BoxMap& map : maps) composer.Add(map);
  Gather beside = composer.Beside(scales);
  Gather gather = std::move(composer).Finish();
  CKPT_RETURN_IF_ERROR(ProveCoverage(gather, to));
  return ScaledSource(std::move(gather), std::move(beside), sources.front()->source.block);
}

bool IsInside(const std::vector<uint64_t>& begin, const Shape& extent, const Shape& shape) {
  if (begin.size() != shape.size() || extent.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (!RangeInside(begin[d], extent[d], shape[d])) return false;
  }
  return true;
}

// REQUIRES: the box without its steps lies inside.
bool StepsInside(const BoxMap& map, const Shape& from) {
  if (map.from_step.empty()) return true;
  if (map.from_step.size() != from.size()) return false;
  for (size_t d = 0; d < from.size(); ++d) {
    if (map.from_step[d] == 0 || map.from_step[d] > std::max<uint64_t>(from[d], 1)) return false;
    if (map.from_extent[d] < 2) continue;
    const uint64_t last = from[d] - 1 - map.from_begin[d];
    if (map.from_step[d] > last / (map.from_extent[d] - 1)) return false;
  }
  return true;
}

}  // namespace

Shape TargetExtent(const BoxMap& map) {
  Shape extent;
  for (const int8_t axis : map.axis) {
    extent.push_back(axis < 0 ? 1 : map.from_extent[static_cast<size_t>(axis)]);
  }
  return extent;
}

Status CheckBoxMap(const BoxMap& map, const Shape& from, const Shape& to) {
  if (!IsInside(map.from_begin, map.from_extent, from) || !StepsInside(map, from)) {
    return Refuse("a box of a map leaves its source of shape ", ShapeToString(from));
  }
  std::vector<bool> used(from.size(), false);
  for (const int8_t axis : map.axis) {
    if (axis < 0) continue;
    if (static_cast<size_t>(axis) >= from.size() || used[static_cast<size_t>(axis)]) {
      return Refuse("a map uses dimension ", static_cast<int>(axis), " of ", ShapeToString(from),
                    " twice, or there is none");
    }
    used[static_cast<size_t>(axis)] = true;
  }
  for (size_t d = 0; d < from.size(); ++d) {
    if (!used[d] && map.from_extent[d] != 1) {
      return Refuse("a map drops dimension ", d, ", of which it takes ", map.from_extent[d]);
    }
  }
  if (!IsInside(map.to_begin, TargetExtent(map), to)) {
    return Refuse("a box of a map leaves its target of shape ", ShapeToString(to));
  }
  return {};
}

BoxMap Inverse(const BoxMap& map, uint32_t from) {
  BoxMap out;
  out.from = from;
  out.from_begin = map.to_begin;
  out.from_extent = TargetExtent(map);
  out.to_begin = map.from_begin;
  out.axis.assign(map.from_begin.size(), -1);
  for (size_t d = 0; d < map.axis.size(); ++d) {
    if (map.axis[d] >= 0) out.axis[static_cast<size_t>(map.axis[d])] = static_cast<int8_t>(d);
  }
  return out;
}

Result<AtomSource> ComposeSource(std::span<const Atom* const> sources, std::span<const BoxMap> maps,
                                 const Shape& to, std::optional<AtomIndex> master) {
  if (sources.empty()) return Refuse("a tensor without parts");
  CKPT_RETURN_IF_ERROR(ElementCount(to));
  const Way way = WayOf(sources.front()->source);
  for (const Atom* one : sources) {
    if (WayOf(one->source) == way) continue;
    return Cannot(
        StrCat("some of its parts are ", NameOf(way), " and some ", NameOf(WayOf(one->source))));
  }
  for (const BoxMap& map : maps) {
    if (map.from >= sources.size())
      return Refuse("a map of part ", map.from, ", which is not there");
    CKPT_RETURN_IF_ERROR(CheckBoxMap(map, sources[map.from]->shape, to));
  }
  switch (way) {
    case Way::kGathered: return ComposeGathered(sources, maps, to);
    case Way::kAveraged: return ComposeAveraged(sources, maps, to);
    case Way::kScaled: return ComposeScaled(sources, maps, to);
    case Way::kInline: return ComposeInline(sources, to);
    case Way::kCast: break;
  }
  if (!master) return Cannot("it is a cast of a tensor that is not there");
  return CastSource(*master);
}

}  // namespace ckptfs
