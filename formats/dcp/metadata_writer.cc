// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/metadata_writer.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "core/base/strings.h"
#include "formats/dcp/box_index.h"
#include "formats/dcp/directory_index.h"

namespace ckptfs::dcp {
namespace {

// A reader of 128 KiB renders few pieces, and little that it did not ask for.
constexpr uint64_t kPieceBytes = 64 << 10;

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

// The memo's entries, by number.
enum Memo : uint8_t {
  kTensorClass,
  kBytesClass,
  kPropertiesClass,
  kChunkClass,
  kIndexClass,
  kInfoClass,
  kMemoryFormat,
  kSize,
  kGetLayout,
  kStrided,
  kSizeText,
  kChunksText,
  kPropertiesText,
  kOffsetsText,
  kSizesText,
  kNameText,
  kOffsetText,
  kPathText,
  kLengthText,
  kMemoEnd,
};
struct MemoGlobal {
  Memo memo;
  std::string_view module;
  std::string_view name;
};
constexpr std::array<MemoGlobal, 9> kGlobals = {{
    {kTensorClass, kMetadataModule, "TensorStorageMetadata"},
    {kBytesClass, kMetadataModule, "BytesStorageMetadata"},
    {kPropertiesClass, kMetadataModule, "TensorProperties"},
    {kChunkClass, kMetadataModule, "ChunkStorageMetadata"},
    {kIndexClass, kMetadataModule, "MetadataIndex"},
    {kInfoClass, "torch.distributed.checkpoint.filesystem", "_StorageInfo"},
    {kMemoryFormat, kMetadataModule, "_MEM_FORMAT_ENCODING"},
    {kSize, "torch", "Size"},
    {kGetLayout, "torch.serialization", "_get_layout"},
}};
constexpr std::array<std::pair<Memo, std::string_view>, 10> kTexts = {{
    {kStrided, "torch.strided"},
    {kSizeText, "size"},
    {kChunksText, "chunks"},
    {kPropertiesText, "properties"},
    {kOffsetsText, "offsets"},
    {kSizesText, "sizes"},
    {kNameText, "fqn"},
    {kOffsetText, "offset"},
    {kPathText, "relative_path"},
    {kLengthText, "length"},
}};
static_assert(kGlobals.size() + kTexts.size() == kMemoEnd);

// Bytes that are counted, or kept: both by the same code.
class Counter {
 public:
  void Put(std::string_view bytes) { size_ += bytes.size(); }
  uint64_t size() const { return size_; }

 private:
  uint64_t size_ = 0;
};
class Text {
 public:
  void Put(std::string_view bytes) { text_ += bytes; }
  std::string Take() && { return std::move(text_); }

 private:
  std::string text_;
};

// One part of the file; those of `count` boxes have equal lengths.
struct Unit {
  enum class Kind : uint8_t {
    kBegin,      // up to the dict of state_dict_metadata
    kFileName,   // of rank `at`, into the memo
    kDescribe,   // entry `at`, up to its list of chunks
    kChunks,     // boxes of entry `at` in that list
    kDescribed,  // the pickle after the list
    kPlanner,    // between the dicts
    kPath,       // entry `at` in planner_data
    kStorage,    // between the dicts
    kStored,     // boxes of entry `at` in storage_data
    kEnd,
  };
  Kind kind = Kind::kBegin;
  uint64_t at = 0;
  uint64_t first = 0;  // box
  uint64_t count = 1;
};

template <class Index, class Sink>
class Writer {
 public:
  Writer(const Index& index, Sink& sink) : index_(index), sink_(sink) {}

  void Put(const Unit& unit) {
    switch (unit.kind) {
      case Unit::Kind::kBegin: PutBegin(); break;
      case Unit::Kind::kFileName: PutFileName(unit.at); break;
      case Unit::Kind::kDescribe: PutDescription(unit.at); break;
      case Unit::Kind::kChunks:
        PutBoxes(unit, [&](uint64_t box) { PutChunk(unit.at, box); });
        break;
      case Unit::Kind::kDescribed: sink_.Put("sbs"); break;
      case Unit::Kind::kPlanner: PutNextDict("planner_data"); break;
      case Unit::Kind::kPath: PutPath(unit.at); break;
      case Unit::Kind::kStorage: PutNextDict("storage_data"); break;
      case Unit::Kind::kStored:
        PutBoxes(unit, [&](uint64_t box) { PutStored(unit.at, box); });
        break;
      case Unit::Kind::kEnd: sink_.Put("sb."); break;
    }
  }

 private:
  template <class PutOne>
  void PutBoxes(const Unit& unit, const PutOne& put) {
    for (uint64_t i = 0; i < unit.count; ++i) put(unit.first + i);
  }

  void PutLittle(uint64_t value, int width) {
    std::array<char, 8> bytes;
    for (int i = 0; i < width; ++i)
      bytes[static_cast<size_t>(i)] = static_cast<char>(value >> (8 * i));
    sink_.Put({bytes.data(), static_cast<size_t>(width)});
  }
  // BININT; LONG1 of eight bytes.
  void PutInt(uint64_t value, bool wide) {
    sink_.Put(wide ? std::string_view("\x8a\x08") : std::string_view("J"));
    PutLittle(value, wide ? 8 : 4);
  }
  void PutString(std::string_view text) {
    sink_.Put("X");
    PutLittle(text.size(), 4);
    sink_.Put(text);
  }
  void PutGlobal(std::string_view module, std::string_view name) {
    for (std::string_view part :
         {std::string_view("c"), module, std::string_view("\n"), name, std::string_view("\n")}) {
      sink_.Put(part);
    }
  }
  void Get(Memo memo) {
    sink_.Put("h");
    PutLittle(memo, 1);
  }
  void GetFar(uint64_t memo) {
    sink_.Put("j");
    PutLittle(memo, 4);
  }
  // cls.__new__(cls)
  void PutNew(Memo cls) {
    Get(cls);
    sink_.Put(")\x81");
  }
  void PutSize(const Shape& shape, bool wide) {
    Get(kSize);
    sink_.Put("(");
    for (uint64_t dim : shape) PutInt(dim, wide);
    sink_.Put("t\x85R");
  }

  // In the memo behind the constants: entries' keys, then files' names.
  uint64_t KeyMemo(uint64_t entry) const { return kMemoEnd + entry; }
  uint64_t FileMemo(uint64_t rank) const { return kMemoEnd + index_.entries().size() + rank; }
  static bool IsWide(const auto& entry) {
    return std::any_of(entry.shape.begin(), entry.shape.end(), [](uint64_t dim) {
      return dim > static_cast<uint64_t>(std::numeric_limits<int32_t>::max());
    });
  }

  void PutBegin() {
    sink_.Put("\x80\x02");
    for (const MemoGlobal& global : kGlobals) {
      PutGlobal(global.module, global.name);
      Remember(global.memo);
    }
    for (const auto& [memo, text] : kTexts) {
      PutString(text);
      Remember(memo);
    }
    PutGlobal(kMetadataModule, "Metadata");
    sink_.Put(")\x81}");
    PutString("state_dict_metadata");
    sink_.Put("}");
  }
  void Remember(Memo memo) {
    sink_.Put("q");
    PutLittle(memo, 1);
    sink_.Put("0");
  }
  void PutNextDict(std::string_view name) {
    sink_.Put("s");
    PutString(name);
    sink_.Put("}");
  }
  void PutFileName(uint64_t rank) {
    PutString(DataFileName(rank));
    sink_.Put("r");
    PutLittle(FileMemo(rank), 4);
    sink_.Put("0");
  }

  void PutDescription(uint64_t at) {
    const auto& entry = index_.entries()[at];
    PutString(entry.key);
    sink_.Put("r");
    PutLittle(KeyMemo(at), 4);
    if (!entry.tensor) {
      PutNew(kBytesClass);
      sink_.Put("s");
      return;
    }
    PutNew(kTensorClass);
    sink_.Put("}");
    Get(kPropertiesText);
    PutProperties(entry.dtype);
    sink_.Put("s");
    Get(kSizeText);
    PutSize(entry.shape, IsWide(entry));
    sink_.Put("s");
    Get(kChunksText);
    sink_.Put("]");
  }
  // dtype, strided, requires_grad, contiguous, pinned
  void PutProperties(DType dtype) {
    PutNew(kPropertiesClass);
    sink_.Put("(");
    PutGlobal("torch", TorchName(dtype));
    Get(kGetLayout);
    Get(kStrided);
    sink_.Put("\x85R\x89");
    Get(kMemoryFormat);
    sink_.Put(std::string_view("K\x00\x85R\x89tb", 7));
  }
  void PutChunk(uint64_t at, uint64_t box) {
    const auto part = index_.BoxAt(at, box);
    const bool wide = IsWide(index_.entries()[at]);
    PutNew(kChunkClass);
    sink_.Put("}");
    Get(kOffsetsText);
    PutSize(part.begin, wide);
    sink_.Put("s");
    Get(kSizesText);
    PutSize(part.shape, wide);
    sink_.Put("sba");
  }

  void PutPath(uint64_t at) {
    GetFar(KeyMemo(at));
    sink_.Put("(");
    for (const PathStep& step : index_.entries()[at].path) {
      if (step.index) {
        PutInt(*step.index, false);
      } else {
        PutString(step.text);
      }
    }
    sink_.Put("ts");
  }

  void PutStored(uint64_t at, uint64_t box) {
    const auto& entry = index_.entries()[at];
    PutNew(kIndexClass);
    sink_.Put("}");
    Get(kNameText);
    GetFar(KeyMemo(at));
    sink_.Put("s");
    if (entry.tensor) {
      Get(kOffsetText);
      PutSize(index_.BoxAt(at, box).begin, IsWide(entry));
      sink_.Put("s");
    }
    sink_.Put("b");
    const auto place = index_.PlaceOf(at, box);
    PutNew(kInfoClass);
    sink_.Put("}");
    Get(kPathText);
    GetFar(FileMemo(place.rank));
    sink_.Put("s");
    Get(kOffsetText);
    PutInt(place.offset, true);
    sink_.Put("s");
    Get(kLengthText);
    PutInt(place.length, true);
    sink_.Put("sbs");
  }

  const Index& index_;
  Sink& sink_;
};

template <class Index>
uint64_t SizeOf(const Index& index, Unit unit) {
  const uint64_t count = std::exchange(unit.count, 1);
  Counter counter;
  Writer<Index, Counter>(index, counter).Put(unit);
  return counter.size() * count;
}

// visit(Unit) for all of the file, in order.
template <class Index, class Visit>
void ForEachUnit(const Index& index, const Visit& visit) {
  const auto boxes = [&](Unit::Kind kind, uint64_t e) {
    const bool tensor = index.entries()[e].tensor;
    visit(Unit{kind, e, 0, tensor ? index.BoxCount(e) : 1});
  };
  visit(Unit{Unit::Kind::kBegin});
  for (uint64_t rank = 0; rank < index.ranks(); ++rank) {
    if (index.FileSize(rank) > 0) visit(Unit{Unit::Kind::kFileName, rank});
  }
  for (uint64_t e = 0; e < index.entries().size(); ++e) {
    visit(Unit{Unit::Kind::kDescribe, e});
    if (!index.entries()[e].tensor) continue;
    boxes(Unit::Kind::kChunks, e);
    visit(Unit{Unit::Kind::kDescribed, e});
  }
  visit(Unit{Unit::Kind::kPlanner});
  for (uint64_t e = 0; e < index.entries().size(); ++e) visit(Unit{Unit::Kind::kPath, e});
  visit(Unit{Unit::Kind::kStorage});
  for (uint64_t e = 0; e < index.entries().size(); ++e) boxes(Unit::Kind::kStored, e);
  visit(Unit{Unit::Kind::kEnd});
}

// Units that are rendered together.
template <class Index>
struct Pieces {
  std::shared_ptr<const Index> index;
  std::vector<Unit> units;
  std::vector<size_t> begins;  // of each piece in `units`, and the end

  Result<std::string> Render(uint64_t piece) const {
    Text text;
    Writer<Index, Text> writer(*index, text);
    for (size_t u = begins[piece]; u < begins[piece + 1]; ++u) writer.Put(units[u]);
    return std::move(text).Take();
  }
};

}  // namespace

std::string DataFileName(uint64_t rank) { return StrCat("__", rank, "_0.distcp"); }

template <class Index>
uint64_t MetadataSize(const Index& index) {
  uint64_t size = 0;
  ForEachUnit(index, [&](const Unit& unit) { size += SizeOf(index, unit); });
  return size;
}

template <class Index>
Plan MetadataPlan(std::shared_ptr<const Index> index) {
  auto pieces = std::make_shared<Pieces<Index>>();
  pieces->index = std::move(index);
  pieces->begins.push_back(0);
  std::vector<uint64_t> lengths;
  uint64_t length = 0;
  const auto close = [&] {
    if (length == 0) return;
    lengths.push_back(std::exchange(length, 0));
    pieces->begins.push_back(pieces->units.size());
  };
  ForEachUnit(*pieces->index, [&](Unit unit) {
    const uint64_t each = SizeOf(*pieces->index, Unit{unit.kind, unit.at, unit.first, 1});
    while (unit.count > 0) {
      const uint64_t fit = length < kPieceBytes ? (kPieceBytes - length) / each + 1 : 1;
      Unit part = unit;
      part.count = std::min(unit.count, fit);
      pieces->units.push_back(part);
      length += each * part.count;
      unit.first += part.count;
      unit.count -= part.count;
      if (length >= kPieceBytes) close();
    }
  });
  close();
  const auto renderer = std::make_shared<const PieceRenderer>(
      [pieces](uint64_t piece) { return pieces->Render(piece); });
  PlanBuilder plan;
  for (size_t i = 0; i < lengths.size(); ++i) plan.Append(lengths[i], RenderedSegment{renderer, i});
  return std::move(plan).Finish();
}

template uint64_t MetadataSize(const DirectoryIndex&);
template uint64_t MetadataSize(const BoxIndex&);
template Plan MetadataPlan(std::shared_ptr<const DirectoryIndex>);
template Plan MetadataPlan(std::shared_ptr<const BoxIndex>);

}  // namespace ckptfs::dcp
