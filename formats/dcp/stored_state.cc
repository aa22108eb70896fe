// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/stored_state.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/io/near_reads.h"
#include "core/state/model_choice.h"
#include "core/state/shared_rows.h"
#include "formats/dcp/chunk_archives.h"
#include "formats/dcp/safetensors_shards.h"

namespace ckptfs::dcp {
namespace {

constexpr size_t kMaxOpen = 64;
constexpr size_t kSlice = 16384;  // archives that one piece of work looks at

uint64_t VolumeOf(std::span<const uint64_t> sizes) {
  uint64_t volume = 1;
  for (const uint64_t size : sizes) volume *= size;
  return volume;
}

}  // namespace

Result<StoredState> StoredState::Read(const StepCandidate& step,
                                      const std::vector<PartFiles>& parts, Assembler& assembler) {
  StoredState state(step, assembler);
  CKPT_RETURN_IF_ERROR(state.ReadParts(parts));
  CKPT_RETURN_IF_ERROR(state.RegisterFiles());
  state.first_byte_.assign(state.metadata_.chunks.size(), 0);
  CKPT_RETURN_IF_ERROR(state.LocateArchives());
  CKPT_RETURN_IF_ERROR(state.LocatePlain());
  return state;
}

// ---- what there is --------------------------------------------------------------

Status StoredState::ReadParts(const std::vector<PartFiles>& parts) {
  std::vector<DcpMetadata> all;
  const auto optimizers_alone = [&] {
    return std::ranges::all_of(all, [](const DcpMetadata& one) {
      return std::ranges::all_of(one.tensors, [](const TensorEntry& tensor) {
        return !OptimizerPrefixOf(tensor.name).empty();
      });
    });
  };
  for (const PartFiles& part : parts) {
    if (part.beside && !optimizers_alone()) continue;  // the weights are where the optimizer is
    by_rank_ |= !part.metadata && part.ranks.size() > 1;
    CKPT_ASSIGN_OR_RETURN(DcpMetadata metadata, ReadPart(part));
    for (std::string& file : metadata.files) {
      if (Status plain = CheckPlainPath(file); !plain) {
        return Fail(std::move(plain).error().WithContext(
            StrCat(step_.root->PathOf(BelowStep(part.directory)), ": .metadata")));
      }
      file = JoinPath(part.directory, file);
    }
    all.push_back(std::move(metadata));
  }
  auto merged = MergeMetadata(std::move(all));
  if (!merged) return Fail(std::move(merged).error().WithContext(step_.Path()));
  metadata_ = *std::move(merged);
  return {};
}

Result<DcpMetadata> StoredState::ReadPart(const PartFiles& part) {
  if (part.metadata) {
    return ReadMetadataFile(JoinPath(part.directory, std::string(kMetadataFile)));
  }
  if (!part.shards.empty()) return ReadShardFiles(part);
  std::vector<DcpMetadata> ranks;
  for (size_t rank = 0; rank < part.ranks.size(); ++rank) {
    if (part.ranks[rank] != StrCat("__", rank, kMetadataFile)) {
      return Refuse(step_.Path(), ": there is ", part.ranks[rank], ", but no __", rank,
                    kMetadataFile);
    }
    CKPT_ASSIGN_OR_RETURN(DcpMetadata one,
                          ReadMetadataFile(JoinPath(part.directory, part.ranks[rank])));
    ranks.push_back(std::move(one));
  }
  if (ranks.empty()) return Refuse(step_.Path(), ": no .metadata");
  auto merged = MergeMetadata(std::move(ranks));
  if (!merged) return Fail(std::move(merged).error().WithContext(step_.Path()));
  return merged;
}

// Its stamp first, so that what changes while it is read is found.
Result<DcpMetadata> StoredState::ReadMetadataFile(const std::string& path) {
  const auto root = RootBelow(step_.root, step_.save);
  CKPT_ASSIGN_OR_RETURN(const BlobIndex blob,
                        assembler_.AddFile(assembler_.AddRoot(root), step_.Prefix() + path));
  CKPT_ASSIGN_OR_RETURN(const auto file, step_.root->Open(BelowStep(path)));
  CKPT_ASSIGN_OR_RETURN(DcpMetadata metadata, ReadMetadata(*file));
  CKPT_RETURN_IF_ERROR(CheckUnchanged(*file, blob));
  return metadata;
}

// Their stamps first, as above.
Result<DcpMetadata> StoredState::ReadShardFiles(const PartFiles& part) {
  const auto root = assembler_.AddRoot(RootBelow(step_.root, step_.save));
  std::vector<BlobIndex> blobs;
  for (const std::string& shard : part.shards) {
    const std::string path = JoinPath(part.directory, shard);
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler_.AddFile(root, step_.Prefix() + path));
    blobs.push_back(blob);
  }
  CKPT_ASSIGN_OR_RETURN(DcpMetadata metadata, ReadShards(*step_.root, BelowStep(part.directory),
                                                         part.shards, part.whole));
  for (size_t i = 0; i < blobs.size(); ++i) {
    const std::string path = JoinPath(part.directory, part.shards[i]);
    CKPT_ASSIGN_OR_RETURN(const auto file, step_.root->Open(BelowStep(path)));
    CKPT_RETURN_IF_ERROR(CheckUnchanged(*file, blobs[i]));
  }
  return metadata;
}

Status StoredState::CheckUnchanged(const File& file, BlobIndex blob) const {
  CKPT_ASSIGN_OR_RETURN(const FileIdentity now, file.Identity());
  if (now.stamp == assembler_.blob(blob).stamp) return {};
  return Fail(ErrorCode::kStale, StrCat(file.name(), ": changed while it was read"));
}

Status StoredState::RegisterFiles() {
  const auto root = assembler_.AddRoot(RootBelow(step_.root, step_.save));
  for (const std::string& file : metadata_.files) {
    auto blob = assembler_.AddFile(root, step_.Prefix() + file);
    if (!blob && blob.error().code == ErrorCode::kNotFound) {
      return Refuse(step_.root->PathOf(BelowStep(file)), ": missing, though .metadata names it");
    }
    if (!blob) return Fail(std::move(blob).error());
    blobs_.push_back(*blob);
  }
  return {};
}

Result<std::shared_ptr<const File>> StoredState::OpenFile(uint32_t file) {
  const auto known = open_.find(file);
  if (known != open_.end()) return known->second;
  if (open_.size() >= kMaxOpen) open_.clear();
  CKPT_ASSIGN_OR_RETURN(auto opened, step_.root->Open(BelowStep(metadata_.files[file])));
  CKPT_RETURN_IF_ERROR(CheckUnchanged(*opened, blobs_[file]));
  open_.emplace(file, opened);
  return opened;
}

// ---- where it lies --------------------------------------------------------------

bool StoredState::IsEmpty(const TensorEntry& tensor, size_t chunk) const {
  return VolumeOf(metadata_.SizesOf(tensor, chunk)) == 0;
}

// File by file in the order of their bytes, many at a time.
Status StoredState::LocateArchives() {
  struct Asked {
    uint32_t file;
    uint32_t tensor;
    size_t chunk;  // of all
  };
  std::vector<Asked> asked;
  asked.reserve(metadata_.chunks.size());
  for (uint32_t t = 0; t < metadata_.tensors.size(); ++t) {
    const TensorEntry& tensor = metadata_.tensors[t];
    for (size_t i = 0; i < tensor.chunk_count; ++i) {
      const size_t chunk = tensor.first_chunk + i;
      const uint32_t file = metadata_.chunks[chunk].file;
      if (!IsEmpty(tensor, i) && !metadata_.IsPlain(file)) asked.push_back({file, t, chunk});
    }
  }
  std::sort(asked.begin(), asked.end(), [&](const Asked& a, const Asked& b) {
    return std::pair(a.file, metadata_.chunks[a.chunk].offset) <
           std::pair(b.file, metadata_.chunks[b.chunk].offset);
  });
  std::vector<size_t> slices;  // where each begins
  for (size_t i = 0; i < asked.size(); ++i) {
    const bool begins =
        slices.empty() || asked[i].file != asked[slices.back()].file || i - slices.back() == kSlice;
    if (begins) slices.push_back(i);
  }
  slices.push_back(asked.size());
  std::vector<Status> outcomes(slices.size() - 1);
  std::vector<std::vector<std::pair<size_t, FileTensor>>> strided(outcomes.size());
  std::vector<std::vector<std::pair<size_t, std::string>>> others(outcomes.size());
  ParallelFor(outcomes.size(), [&](size_t s) {
    const auto work = [&]() -> Status {
      const std::span<const Asked> part(asked.data() + slices[s], slices[s + 1] - slices[s]);
      const uint32_t number = part[0].file;
      CKPT_ASSIGN_OR_RETURN(const auto file, step_.root->Open(BelowStep(metadata_.files[number])));
      std::vector<ChunkAsked> chunks;
      chunks.reserve(part.size());
      for (const Asked& one : part) {
        const TensorEntry& tensor = metadata_.tensors[one.tensor];
        const StoredExtent& extent = metadata_.chunks[one.chunk];
        chunks.push_back({extent.offset, extent.length, tensor.dtype,
                          metadata_.SizesOf(tensor, one.chunk - tensor.first_chunk)});
      }
      CKPT_ASSIGN_OR_RETURN(ChunksFound found, LocateChunks(file, blobs_[number], chunks));
      for (size_t i = 0; i < part.size(); ++i) first_byte_[part[i].chunk] = found.dense[i];
      for (auto& [i, tensor] : found.strided) {
        strided[s].emplace_back(part[i].chunk, std::move(tensor));
      }
      for (auto& [i, what] : found.others) others[s].emplace_back(part[i].chunk, std::move(what));
      return CheckUnchanged(*file, blobs_[number]);
    };
    outcomes[s] = work();
  });
  for (Status& outcome : outcomes) CKPT_RETURN_IF_ERROR(std::move(outcome));
  for (auto& part : strided) {
    for (auto& [chunk, tensor] : part) strided_.emplace(chunk, std::move(tensor));
  }
  for (auto& part : others) {
    for (auto& [chunk, what] : part) others_.emplace(chunk, std::move(what));
  }
  return {};
}

// Elements by themselves.
Status StoredState::LocatePlain() {
  for (const TensorEntry& tensor : metadata_.tensors) {
    for (size_t i = 0; i < tensor.chunk_count; ++i) {
      const StoredExtent& extent = metadata_.chunks[tensor.first_chunk + i];
      if (!metadata_.IsPlain(extent.file)) continue;
      if (ByteWidth(tensor.dtype) == 0) {
        return Fail(ErrorCode::kUnsupported,
                    StrCat(step_.Path(), ": '", tensor.name, "': elements of less than a byte"));
      }
      const auto sizes = metadata_.SizesOf(tensor, i);
      CKPT_ASSIGN_OR_RETURN(const uint64_t bytes,
                            ByteCount({sizes.begin(), sizes.end()}, tensor.dtype));
      CKPT_CHECK(bytes == extent.length);  // as the header's parser found
      first_byte_[tensor.first_chunk + i] = extent.offset;
    }
  }
  return {};
}

// ---- tensors ---------------------------------------------------------------------

constexpr std::string_view kSpares = "more ranks saved some boxes than others, such as of ";

// Chunks (of the tensor) by copy.  Ranks that save by themselves write what they hold
// alike each: boxes that are there equally often make as many copies, else the first
// of each is taken.
std::vector<std::vector<size_t>> StoredState::CopiesOf(const TensorEntry& tensor) const {
  std::map<std::pair<std::vector<uint64_t>, std::vector<uint64_t>>, size_t> times;
  std::vector<std::vector<size_t>> copies(1);
  std::vector<size_t> chunks;
  for (size_t i = 0; i < tensor.chunk_count; ++i) {
    if (!IsEmpty(tensor, i)) chunks.push_back(i);
  }
  if (!by_rank_) {
    copies[0] = std::move(chunks);
    return copies;
  }
  for (const size_t i : chunks) {
    const auto offsets = metadata_.OffsetsOf(tensor, i);
    const auto sizes = metadata_.SizesOf(tensor, i);
    const size_t copy = times[{{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}}]++;
    if (copies.size() <= copy) copies.resize(copy + 1);
    copies[copy].push_back(i);
  }
  const bool even = std::ranges::all_of(
      copies, [&](const std::vector<size_t>& copy) { return copy.size() == copies[0].size(); });
  if (!even) copies.resize(1);
  return copies;
}

std::string StoredState::WhyNotPlain(size_t tensor) const {
  const TensorEntry& entry = metadata_.tensors[tensor];
  const auto other = others_.lower_bound(entry.first_chunk);
  if (other == others_.end() || other->first >= entry.first_chunk + entry.chunk_count) return "";
  return StrCat("its chunk is not a plain tensor but ", other->second,
                ", whose parts do not say their elements");
}

Status StoredState::AddFragments(size_t tensor, AtomIndex atom) const {
  const TensorEntry& entry = metadata_.tensors[tensor];
  if (const std::string why = WhyNotPlain(tensor); !why.empty()) {
    return Fail(ErrorCode::kUnsupported, StrCat("'", entry.name, "': ", why));
  }
  const auto copies = CopiesOf(entry);
  for (uint32_t copy = 0; copy < copies.size(); ++copy) {
    if (Status added = AddCopy(entry, copies[copy], atom, copy); !added) {
      return Fail(std::move(added).error().WithContext(StrCat("'", entry.name, "'")));
    }
  }
  if (copies.size() > 1) assembler_.DeclareReplicas(atom);
  if (copies.size() == 1 && by_rank_) NoteSpares(entry, copies[0].size());
  return {};
}

// Notes the first such tensor: more ranks have some of its boxes than others, and one of these
// is compared with nothing.
void StoredState::NoteSpares(const TensorEntry& tensor, size_t taken) const {
  size_t held = 0;
  for (size_t i = 0; i < tensor.chunk_count; ++i) held += IsEmpty(tensor, i) ? 0 : 1;
  std::vector<std::string>& notes = assembler_.header().notes;
  const auto said = [](const std::string& note) { return note.starts_with(kSpares); };
  if (held == taken || std::ranges::any_of(notes, said)) return;
  notes.push_back(StrCat(kSpares, "'", tensor.name,
                         "': the first copy is taken, and the others "
                         "are not "
                         "compared with it"));
}

Status StoredState::AddCopy(const TensorEntry& tensor, const std::vector<size_t>& chunks,
                            AtomIndex atom, uint32_t copy) const {
  SharedRows rows(tensor.shape);
  auto beside = SharedRows::Beside::kNothing;
  for (const size_t i : chunks) {
    const size_t chunk = tensor.first_chunk + i;
    if (strided_.contains(chunk)) {
      CKPT_RETURN_IF_ERROR(AddStrided(tensor, i, atom, copy));
      beside = SharedRows::Beside::kOthers;
      continue;
    }
    const auto offsets = metadata_.OffsetsOf(tensor, i);
    const auto sizes = metadata_.SizesOf(tensor, i);
    rows.Add({{offsets.begin(), offsets.end()},
              {sizes.begin(), sizes.end()},
              blobs_[metadata_.chunks[chunk].file],
              first_byte_[chunk],
              tensor.dtype});
  }
  std::move(rows).Place(assembler_, atom, copy, beside);
  return {};
}

// An index of the outermost dimension is a run of a dense chunk.
Status StoredState::AddRow(size_t tensor, uint64_t row, AtomIndex atom) const {
  const TensorEntry& entry = metadata_.tensors[tensor];
  if (const std::string why = WhyNotPlain(tensor); !why.empty()) {
    return Fail(ErrorCode::kUnsupported, StrCat("'", entry.name, "': ", why));
  }
  SharedRows rows({entry.shape.begin() + 1, entry.shape.end()});
  const auto copies = CopiesOf(entry);
  for (const size_t i : copies.front()) {
    const size_t chunk = entry.first_chunk + i;
    const auto offsets = metadata_.OffsetsOf(entry, i);
    const auto sizes = metadata_.SizesOf(entry, i);
    if (row < offsets[0] || row - offsets[0] >= sizes[0]) continue;
    if (strided_.contains(chunk)) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", entry.name, "': a chunk's elements do not lie in their order"));
    }
    const Shape shape(sizes.begin() + 1, sizes.end());
    const uint64_t bytes = VolumeOf(sizes.subspan(1)) * ByteWidth(entry.dtype);
    rows.Add({{offsets.begin() + 1, offsets.end()},
              shape,
              blobs_[metadata_.chunks[chunk].file],
              first_byte_[chunk] + (row - offsets[0]) * bytes,
              entry.dtype});
  }
  std::move(rows).Place(assembler_, atom, 0, SharedRows::Beside::kNothing);
  return {};
}

Status StoredState::AddInsets(std::span<const Inset> insets, const Shape& whole,
                              AtomIndex atom) const {
  SharedRows rows(whole);
  for (const Inset& inset : insets) {
    const TensorEntry& entry = metadata_.tensors[inset.tensor];
    if (const std::string why = WhyNotPlain(inset.tensor); !why.empty()) {
      return Fail(ErrorCode::kUnsupported, StrCat("'", entry.name, "': ", why));
    }
    const size_t outer = whole.size() - entry.shape.size();
    const auto copies = CopiesOf(entry);
    for (const size_t i : copies.front()) {
      const size_t chunk = entry.first_chunk + i;
      if (strided_.contains(chunk)) {
        return Fail(ErrorCode::kUnsupported,
                    StrCat("'", entry.name, "': a chunk's elements do not lie in their order"));
      }
      const auto offsets = metadata_.OffsetsOf(entry, i);
      const auto sizes = metadata_.SizesOf(entry, i);
      std::vector<uint64_t> begin = inset.begin;
      Shape shape(outer, 1);
      for (size_t d = 0; d < offsets.size(); ++d) begin[outer + d] += offsets[d];
      shape.insert(shape.end(), sizes.begin(), sizes.end());
      rows.Add({std::move(begin), std::move(shape), blobs_[metadata_.chunks[chunk].file],
                first_byte_[chunk], entry.dtype});
    }
  }
  std::move(rows).Place(assembler_, atom, 0, SharedRows::Beside::kNothing);
  return {};
}

Status StoredState::AddStrided(const TensorEntry& tensor, size_t i, AtomIndex atom,
                               uint32_t copy) const {
  const auto offsets = metadata_.OffsetsOf(tensor, i);
  const auto sizes = metadata_.SizesOf(tensor, i);
  LocalTensor local{{sizes.begin(), sizes.end()}, {}};
  local.pieces.push_back(
      Piece{local.shape, {offsets.begin(), offsets.end()}, 0, RowMajorStrides(local.shape), 1.0});
  CKPT_ASSIGN_OR_RETURN(FileTensor::Held held, strided_.at(tensor.first_chunk + i).As(local));
  const uint32_t index = assembler_.AddLocal(atom, copy, std::move(held.local));
  assembler_.AddFragment(atom, copy, index, held.fragment);
  return {};
}

std::optional<StoredTensor> StoredState::Whole(size_t tensor) const {
  const TensorEntry& entry = metadata_.tensors[tensor];
  const auto copies = CopiesOf(entry);
  if (copies[0].size() != 1 || !WhyNotPlain(tensor).empty()) return std::nullopt;
  const size_t i = copies[0][0];
  const size_t chunk = entry.first_chunk + i;
  const bool whole = std::ranges::equal(metadata_.SizesOf(entry, i), entry.shape);
  if (!whole || strided_.contains(chunk)) return std::nullopt;
  return StoredTensor{entry.dtype, entry.shape, RowMajorStrides(entry.shape),
                      blobs_[metadata_.chunks[chunk].file], first_byte_[chunk]};
}

Result<std::string> StoredState::ReadSmall(size_t tensor) {
  const TensorEntry& entry = metadata_.tensors[tensor];
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(entry.shape));
  if (elements != 1 || !Whole(tensor)) {
    return Refuse("'", entry.name, "' is not one element in one place");
  }
  std::optional<std::string> bytes;
  for (const std::vector<size_t>& copy : CopiesOf(entry)) {
    const size_t chunk = entry.first_chunk + copy[0];
    CKPT_ASSIGN_OR_RETURN(const auto file, OpenFile(metadata_.chunks[chunk].file));
    CKPT_ASSIGN_OR_RETURN(std::string read,
                          file->Read(first_byte_[chunk], ByteWidth(entry.dtype), entry.name));
    if (bytes && *bytes != read) {
      return Refuse("'", entry.name, "': ranks that saved by themselves have different values: ",
                    "they did not save the same moment");
    }
    bytes = std::move(read);
  }
  return *std::move(bytes);
}

std::optional<StoredState::DensePlace> StoredState::DensePlaceOf(size_t tensor,
                                                                 size_t chunk) const {
  const TensorEntry& entry = metadata_.tensors[tensor];
  const size_t number = entry.first_chunk + chunk;
  if (strided_.contains(number) || IsEmpty(entry, chunk)) return std::nullopt;
  const uint32_t file = metadata_.chunks[number].file;
  return DensePlace{file, blobs_[file], first_byte_[number]};
}

Status StoredState::ReadRanges(std::vector<FileRange> ranges) const {
  std::ranges::sort(ranges, {},
                    [](const FileRange& one) { return std::pair(one.file, one.offset); });
  std::vector<size_t> firsts;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (i == 0 || ranges[i].file != ranges[i - 1].file) firsts.push_back(i);
  }
  firsts.push_back(ranges.size());
  std::vector<Status> outcomes(firsts.size() - 1);
  ParallelFor(outcomes.size(), [&](size_t f) {
    const auto work = [&]() -> Status {
      const uint32_t number = ranges[firsts[f]].file;
      CKPT_ASSIGN_OR_RETURN(const auto file, step_.root->Open(BelowStep(metadata_.files[number])));
      std::vector<ReadRequest> requests;
      for (size_t i = firsts[f]; i < firsts[f + 1]; ++i) {
        requests.push_back({ranges[i].offset, ranges[i].out});
      }
      if (auto read = ReadNear(*file, requests); !read) return Fail(std::move(read).error());
      return CheckUnchanged(*file, blobs_[number]);
    };
    outcomes[f] = work();
  });
  for (Status& outcome : outcomes) CKPT_RETURN_IF_ERROR(std::move(outcome));
  return {};
}

Result<StoredState::Object> StoredState::OpenObject(size_t object) {
  const ObjectEntry& entry = metadata_.objects[object];
  CKPT_ASSIGN_OR_RETURN(const auto file, OpenFile(entry.extent.file));
  auto opened = OpenArchive(file, entry.extent.offset, entry.extent.length);
  if (!opened) return Fail(std::move(opened).error().WithContext(StrCat("'", entry.name, "'")));
  return Object{*std::move(opened), blobs_[entry.extent.file]};
}

}  // namespace ckptfs::dcp
