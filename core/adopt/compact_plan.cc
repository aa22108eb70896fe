// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/compact_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "core/access/access_rule.h"
#include "core/access/kept_gates.h"
#include "core/access/searched_directories.h"
#include "core/adopt/stored_places.h"
#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/model/read_blobs.h"
#include "core/model/side_blob.h"
#include "core/model/step_notes.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMaxPackedFiles = 256;

// A file of whole tensors stays as it is if no more than one byte in eight is something else, and
// a header.
constexpr uint64_t kShare = 8;
constexpr uint64_t kHeader = uint64_t{64} << 10;

// Bytes that will be one tensor of a packed file.
struct Entry {
  std::string key;
  DType dtype = DType::kU8;
  Shape shape;
  uint64_t bytes = 0;
  std::optional<AtomIndex> atom;  // all of it
  BlobIndex blob{};               // else so many bytes from `offset` on, `step` apart
  int64_t blob_step = 0;
  uint64_t offset = 0;
  int64_t offset_step = 0;
  uint32_t count = 1;  // stretches of bytes / count
  size_t file = 0;     // where it will be
  uint64_t place = 0;  // byte of that file
};

class Planner {
 public:
  Planner(const StepModel& step, const std::string& source, BlobReader& blobs)
      : step_(step), source_(source), blobs_(blobs) {}

  Result<CompactPlan> Plan(const ShownWhole& shown_whole, uint64_t file_bytes);

 private:
  Status ChooseKept(const ShownWhole& shown_whole);
  Status LookAtNotes();
  bool StaysWhole(const Atom& atom) const;
  void ChooseInPlace();
  void CollectEntries();
  void AddAtom(AtomIndex index, const Atom& atom);
  void AddVerbatim(AtomIndex index, const Atom& atom);
  void Arrange(uint64_t file_bytes);
  Status PlanPacked();
  void NumberBlobs();
  Status FillBlobs();
  void FillAtoms();
  Status FillFacts();
  Result<OwnerAndMode> AccessOf(uint32_t blob) const;
  Result<OwnerAndMode> PackedAccess() const;
  Status FindGates();
  Gather Moved(const Gather& gather, std::span<const size_t> entries) const;

  const StepModel& step_;
  const std::string& source_;
  BlobReader& blobs_;
  CompactPlan plan_;
  std::vector<uint8_t> read_;      // by blob: something is read of it
  std::vector<uint8_t> keep_;      // the file stays as it is
  std::vector<uint8_t> in_place_;  // by root
  std::vector<Entry> entries_;
  std::map<uint32_t, std::vector<size_t>> of_atom_;  // entries, by atom that is not one of its own
  std::map<uint32_t, size_t> whole_;                 // entry of an atom that is
  std::map<std::pair<uint32_t, uint64_t>, size_t> of_range_;  // by blob and the range's begin
  std::map<uint32_t, std::vector<ByteRange>> ranges_;         // of documents' tensors, by blob
  uint64_t packed_count_ = 0;
  std::vector<std::optional<uint32_t>> numbers_;
  std::vector<uint32_t> packed_blobs_;  // numbers of the packed files' blobs
};

bool Planner::StaysWhole(const Atom& atom) const {
  const auto fragment = WholeFragment(atom);
  return fragment && keep_[static_cast<uint32_t>(fragment->blob)] != 0;
}

// A file beside the step that somebody writes is the only one that may be missing.
Status Planner::LookAtNotes() {
  const bool tool = step_.facts.tool.has_value();
  for (uint32_t i = 0; i < step_.blobs.size(); ++i) {
    if (read_[i] != 0 || keep_[i] == 0) continue;
    const auto file = blobs_.Open(BlobIndex{i});
    if (file) continue;
    if (tool) return Fail(Error(file.error()));
    keep_[i] = 0;
    plan_.lost.push_back(StrCat(step_.blobs[i].path, ": ", file.error().message));
  }
  return {};
}

Status Planner::ChooseKept(const ShownWhole& shown_whole) {
  const size_t count = step_.blobs.size();
  read_ = FindReadBlobs(step_);
  std::vector<uint8_t> cut(count, 0);
  std::vector<std::vector<ByteRange>> used(count);
  for (const Atom& atom : step_.atoms) {
    if (!IsStoredInFiles(atom.source)) continue;
    if (const auto fragment = WholeFragment(atom)) {
      const uint64_t bytes = ByteCount(atom.shape, atom.dtype).value_or(0);
      used[static_cast<uint32_t>(fragment->blob)].push_back(
          {fragment->offset, fragment->offset + bytes});
      continue;
    }
    AnyBlobOf(GathersRead(atom.source), [&](uint32_t blob) {
      cut[blob] = 1;
      return false;
    });
  }
  for (const Document& document : step_.documents) {
    for (const StoredTensor& tensor : document.tensors) {
      const auto range = RangeOf(tensor);
      if (range) used[static_cast<uint32_t>(tensor.blob)].push_back(*range);
    }
  }
  const std::vector<uint8_t> shown = shown_whole(step_);
  keep_.assign(count, 0);
  for (uint32_t i = 0; i < count; ++i) {
    const Blob& blob = step_.blobs[i];
    if (blob.side) continue;
    uint64_t bytes = 0;
    for (const ByteRange& range : MergedRanges(std::move(used[i])))
      bytes += range.end - range.begin;
    // One that the store owns may have tensors of other steps, which they share.
    const uint64_t other = blob.owned() ? blob.stamp.size : blob.stamp.size / kShare + kHeader;
    const bool whole = cut[i] == 0 && bytes > 0 && bytes + other >= blob.stamp.size;
    keep_[i] = shown[i] != 0 || read_[i] == 0 || whole ? 1 : 0;
  }
  return LookAtNotes();
}

// A collection takes directories, not files: one of which a file stays would stay as a whole.
void Planner::ChooseInPlace() {
  std::vector<uint8_t> going(step_.roots.size(), 0);
  in_place_.assign(step_.roots.size(), 0);
  for (uint32_t i = 0; i < step_.blobs.size(); ++i) {
    const Blob& blob = step_.blobs[i];
    const bool stays = keep_[i] != 0 && blob.owned();
    if (!blob.side) (stays ? in_place_ : going)[blob.root] = 1;
  }
  for (size_t r = 0; r < going.size(); ++r) {
    if (going[r] != 0) in_place_[r] = 0;
  }
}

// Bytes as they lie, series by series.
void Planner::AddVerbatim(AtomIndex index, const Atom& atom) {
  const std::string name = step_.parameter(atom.parameter).name;
  std::vector<size_t>& own = of_atom_[static_cast<uint32_t>(index)];
  for (const Gather& gather : GathersRead(atom.source)) {
    for (const FragmentSeries& series : gather.series) {
      const uint64_t each = ByteCount({series.elements}, series.dtype).value_or(0);
      Entry entry;
      entry.key = StrCat(atom.kind, "/", name, "/", own.size());
      entry.bytes = each * series.count;
      entry.shape = {entry.bytes};
      entry.blob = BlobIndex{series.blob};
      entry.blob_step = series.blob_step;
      entry.offset = series.offset;
      entry.offset_step = series.offset_step;
      entry.count = series.count;
      own.push_back(entries_.size());
      entries_.push_back(std::move(entry));
    }
  }
}

void Planner::AddAtom(AtomIndex index, const Atom& atom) {
  const auto gathers = GathersRead(atom.source);
  const auto scaled = [](const Gather& gather) { return IsScaled(gather); };
  if (std::any_of(gathers.begin(), gathers.end(), scaled)) return AddVerbatim(index, atom);
  const std::string& name = step_.parameter(atom.parameter).name;
  Entry entry;
  entry.key = atom.optimizer.empty() ? StrCat(atom.kind, "/", name)
                                     : StrCat(atom.optimizer, "/", atom.kind, "/", name);
  entry.bytes = ByteCount(atom.shape, atom.dtype).value_or(0);
  const bool spelled = !SafetensorsName(atom.dtype).empty() && ByteWidth(atom.dtype) != 0;
  if (spelled) entry.dtype = atom.dtype;
  entry.shape = spelled ? atom.shape : Shape{entry.bytes};
  entry.atom = index;
  whole_[static_cast<uint32_t>(index)] = entries_.size();
  entries_.push_back(std::move(entry));
}

void Planner::CollectEntries() {
  for (uint32_t i = 0; i < step_.atoms.size(); ++i) {
    const Atom& atom = step_.atoms[i];
    const bool empty = ElementCount(atom.shape).value_or(0) == 0;
    if (empty || !IsStoredInFiles(atom.source) || StaysWhole(atom)) continue;
    AddAtom(AtomIndex{i}, atom);
    ++plan_.tensors;
  }
  for (const Document& document : step_.documents) {
    for (const StoredTensor& tensor : document.tensors) {
      const auto range = RangeOf(tensor);
      const auto blob = static_cast<uint32_t>(tensor.blob);
      if (range && keep_[blob] == 0) ranges_[blob].push_back(*range);
    }
  }
  for (auto& [blob, ranges] : ranges_) {
    ranges = MergedRanges(std::move(ranges));
    for (const ByteRange& range : ranges) {
      Entry entry;
      entry.key = StrCat("document/", of_range_.size());
      entry.bytes = range.end - range.begin;
      entry.shape = {entry.bytes};
      entry.blob = BlobIndex{blob};
      entry.offset = range.begin;
      of_range_[{blob, range.begin}] = entries_.size();
      entries_.push_back(std::move(entry));
    }
  }
}

// Wide types first, which keeps all aligned; of a kind in model order, which is how ranks wrote
// and how they read.  Files end where their share of the bytes does.
void Planner::Arrange(uint64_t file_bytes) {
  std::vector<size_t> order(entries_.size());
  uint64_t total = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    total += entries_[i].bytes;
  }
  const auto rank = [&](size_t i) {
    const Entry& entry = entries_[i];
    const Atom* atom = entry.atom ? &step_.atom(*entry.atom) : nullptr;
    return std::tuple(-static_cast<int>(ByteWidth(entry.dtype)),
                      atom == nullptr ? std::string_view() : std::string_view(atom->optimizer),
                      atom == nullptr ? std::string_view() : std::string_view(atom->kind), i);
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rank(a) < rank(b); });
  const uint64_t files = std::clamp<uint64_t>(CeilDiv(total, file_bytes), 1, kMaxPackedFiles);
  std::vector<Entry> sorted;
  std::vector<size_t> now(entries_.size());
  uint64_t done = 0;
  for (const size_t i : order) {
    Entry entry = std::move(entries_[i]);
    // The file in which its middle lies.
    const auto middle = static_cast<unsigned __int128>(done + entry.bytes / 2) * files;
    entry.file = total == 0 ? 0 : static_cast<size_t>(middle / total);
    done += entry.bytes;
    now[i] = sorted.size();
    sorted.push_back(std::move(entry));
  }
  size_t last = 0;  // files without an entry are none
  packed_count_ = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const size_t wanted = sorted[i].file;
    if (i == 0 || wanted != last) ++packed_count_;
    last = wanted;
    sorted[i].file = packed_count_ - 1;
  }
  entries_ = std::move(sorted);
  for (auto& [atom, entry] : whole_) entry = now[entry];
  for (auto& [range, entry] : of_range_) entry = now[entry];
  for (auto& [atom, list] : of_atom_) {
    for (size_t& entry : list) entry = now[entry];
  }
}

std::string NumberedName(uint64_t number) {
  const std::string digits = std::to_string(number);
  return StrCat("packed/", std::string(5 - std::min<size_t>(5, digits.size()), '0'), digits,
                ".safetensors");
}

// The header with the entries' keys, or with numbers if it cannot have these.
Result<std::string> HeaderOf(std::vector<SafetensorsEntry>& list) {
  std::set<std::string_view> keys;
  for (const SafetensorsEntry& one : list) keys.insert(one.name);
  const std::map<std::string, std::string> metadata{{"format", "pt"}};
  if (keys.size() == list.size()) {
    auto header = RenderSafetensorsHeader(metadata, list);
    if (header) return header;
  }
  for (size_t i = 0; i < list.size(); ++i) list[i].name = std::to_string(i);
  return RenderSafetensorsHeader(metadata, list);
}

Status Planner::PlanPacked() {
  std::map<Shape, std::shared_ptr<const LocalTensor>> locals;
  for (size_t begin = 0; begin < entries_.size();) {
    size_t end = begin;
    std::vector<SafetensorsEntry> list;
    for (; end < entries_.size() && entries_[end].file == entries_[begin].file; ++end) {
      list.push_back(
          {.name = entries_[end].key, .dtype = entries_[end].dtype, .shape = entries_[end].shape});
    }
    CKPT_ASSIGN_OR_RETURN(std::string header, HeaderOf(list));
    PlanBuilder builder;
    builder.Literal(std::move(header));
    for (size_t i = begin; i < end; ++i) {
      Entry& entry = entries_[i];
      entry.place = builder.size();
      if (entry.atom) {
        const Atom& atom = step_.atom(*entry.atom);
        auto& local = locals[atom.shape];
        if (!local) local = std::make_shared<const LocalTensor>(WholeTensor(atom.shape));
        builder.Atom(*entry.atom, local, 0, ElementCount(atom.shape).value_or(0), atom.dtype);
        continue;
      }
      const uint64_t each = entry.bytes / entry.count;
      for (uint32_t k = 0; k < entry.count; ++k) {
        const int64_t blob =
            static_cast<int64_t>(static_cast<uint32_t>(entry.blob)) + k * entry.blob_step;
        builder.BlobRange(BlobIndex{static_cast<uint32_t>(blob)},
                          entry.offset + static_cast<uint64_t>(k * entry.offset_step), each);
      }
    }
    plan_.files.push_back({NumberedName(plan_.files.size()), std::move(builder).Finish()});
    CKPT_RETURN_IF_ERROR(plan_.files.back().plan.Validate(step_));
    plan_.packed_bytes += plan_.files.back().plan.size();
    begin = end;
  }
  plan_.packed_files = plan_.files.size();
  return {};
}

// Files that something is read of, the packed ones, and those beside the step.
void Planner::NumberBlobs() {
  numbers_.assign(step_.blobs.size(), std::nullopt);
  uint32_t next = 0;
  const auto number = [&](bool read) {
    for (uint32_t i = 0; i < step_.blobs.size(); ++i) {
      if (keep_[i] != 0 && (read_[i] != 0) == read) numbers_[i] = next++;
    }
  };
  number(true);
  for (uint64_t i = 0; i < packed_count_; ++i) packed_blobs_.push_back(next++);
  number(false);
  plan_.model.blobs.resize(next);
}

Result<OwnerAndMode> Planner::AccessOf(uint32_t blob) const {
  CKPT_ASSIGN_OR_RETURN(const auto file, blobs_.Open(BlobIndex{blob}));
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
  return identity.access;
}

Result<OwnerAndMode> Planner::PackedAccess() const {
  std::vector<OwnerAndMode> gates;
  for (uint32_t i = 0; i < step_.blobs.size(); ++i) {
    if (step_.blobs[i].side || read_[i] == 0) continue;
    CKPT_ASSIGN_OR_RETURN(gates.emplace_back(), AccessOf(i));
  }
  OwnerAndMode access = TightestAccess(gates);
  if (!plan_.gates) access.mode &= 0700;
  return access;
}

// The directories above the files, and those that links lead through.
Status Planner::FindGates() {
  std::set<std::string> searched;
  std::set<OwnerAndMode> gates;
  std::set<std::string> roots;
  bool adopted = false;
  for (uint32_t i = 0; i < step_.blobs.size(); ++i) {
    const Blob& blob = step_.blobs[i];
    if (blob.side) continue;
    const std::string& root = blobs_.RootOf(BlobIndex{i}).name();
    const std::string path = blobs_.PathOf(BlobIndex{i});
    const std::string folder = path.substr(0, path.rfind('/'));
    if (!blob.store_owned) {
      adopted = true;
      AddSearched(folder, searched);
      CKPT_ASSIGN_OR_RETURN(const RootDirectory directory, RootDirectory::Open(root));
      const auto found = directory.Look(blob.path);
      if (found) gates.insert(found->searched.begin(), found->searched.end());
      continue;
    }
    if (roots.insert(root).second) {
      const auto kept = ReadKeptGates(root);
      if (!kept) return {};  // nobody but the owner
      gates.insert(kept->begin(), kept->end());
    }
    for (std::string above = folder; above.size() > root.size(); above.resize(above.rfind('/'))) {
      searched.insert(above);
    }
  }
  if (adopted && source_.starts_with('/')) AddSearched(source_, searched);
  for (const std::string& directory : searched) {
    const auto access = AccessOfDirectory(directory);
    if (!access) gates.insert(kClosedGate);
    if (access && *access) gates.insert(**access);
  }
  plan_.gates.emplace(gates.begin(), gates.end());
  return {};
}

Status Planner::FillBlobs() {
  StepModel& model = plan_.model;
  for (size_t r = 0; r < step_.roots.size(); ++r) {
    const bool side = FindSideBlob(step_) && r + 1 == step_.roots.size();
    if (side) break;
    model.roots.push_back(in_place_[r] != 0 ? step_.roots[r] : "");
  }
  if (packed_count_ > 0) {
    model.roots.push_back("");
    CKPT_ASSIGN_OR_RETURN(const OwnerAndMode access, PackedAccess());
    plan_.access.assign(packed_count_, access);
    plan_.blobs = packed_blobs_;
  }
  for (uint64_t i = 0; i < packed_count_; ++i) {
    Blob& blob = model.blobs[packed_blobs_[i]];
    blob.root = static_cast<uint32_t>(model.roots.size() - 1);
    blob.path = plan_.files[i].path;
    blob.stamp.size = plan_.files[i].plan.size();
  }
  for (uint32_t i = 0; i < step_.blobs.size(); ++i) {
    const Blob& before = step_.blobs[i];
    if (!before.side && !numbers_[i] && !before.owned()) plan_.left_bytes += before.stamp.size;
    if (!numbers_[i]) continue;
    Blob& blob = model.blobs[*numbers_[i]];
    blob = before;
    if (in_place_[before.root] != 0) {
      ++plan_.in_place;
      plan_.in_place_bytes += before.stamp.size;
      continue;
    }
    blob.stamp = BlobStamp{.size = before.stamp.size};
    PlanBuilder builder;
    builder.BlobRange(BlobIndex{i}, 0, before.stamp.size);
    plan_.files.push_back(
        {StrCat("root", before.root, "/", before.path), std::move(builder).Finish()});
    plan_.blobs.push_back(*numbers_[i]);
    CKPT_ASSIGN_OR_RETURN(plan_.access.emplace_back(), AccessOf(i));
    plan_.kept_bytes += before.stamp.size;
  }
  for (size_t i = 0; i < plan_.blobs.size(); ++i) {
    Blob& blob = model.blobs[plan_.blobs[i]];
    blob.store_owned = true;
    blob.mode = plan_.access[i].CertainMode() & 0777;
    blob.uid = plan_.access[i].uid;
    blob.gid = plan_.access[i].gid;
  }
  return {};
}

// A gather whose series lie one behind the other in packed files.
Gather Planner::Moved(const Gather& gather, std::span<const size_t> entries) const {
  Gather moved = gather;
  moved.index.reset();
  for (size_t i = 0; i < moved.series.size(); ++i) {
    FragmentSeries& series = moved.series[i];
    const Entry& entry = entries_[entries[i]];
    series.blob = packed_blobs_[entry.file];
    series.blob_step = 0;
    series.offset = entry.place;
    series.offset_step = static_cast<int64_t>(entry.bytes / entry.count);
  }
  return moved;
}

void Planner::FillAtoms() {
  for (uint32_t i = 0; i < step_.atoms.size(); ++i) {
    Atom& atom = plan_.model.atoms[i];
    const AtomSource& before = step_.atoms[i].source;
    if (!IsStoredInFiles(before)) continue;
    FragmentSeries series;
    series.elements = ElementCount(atom.shape).value_or(0);
    series.flat_step = series.elements;
    series.dtype = atom.dtype;
    if (const auto own = of_atom_.find(i); own != of_atom_.end()) {
      std::vector<Gather> gathers;
      size_t at = 0;
      for (const Gather& gather : GathersRead(before)) {
        const size_t count = gather.series.size();
        gathers.push_back(Moved(gather, std::span(own->second).subspan(at, count)));
        at += count;
      }
      atom.source.gathers = std::move(gathers);
      if (before.kind == SourceKind::kReplicas) atom.source.kind = SourceKind::kGather;
      continue;
    }
    if (const auto entry = whole_.find(i); entry != whole_.end()) {
      series.blob = packed_blobs_[entries_[entry->second].file];
      series.offset = entries_[entry->second].place;
    } else if (series.elements > 0) {
      const auto fragment = WholeFragment(step_.atoms[i]);
      series.blob = *numbers_[static_cast<uint32_t>(fragment->blob)];
      series.offset = fragment->offset;
    }
    atom.source = AtomSource();
    atom.source.gathers.push_back(Gather{{WholeTensor(atom.shape)}, {}});
    if (series.elements > 0) atom.source.gathers.front().series.push_back(series);
  }
  for (Document& document : plan_.model.documents) {
    for (StoredTensor& tensor : document.tensors) {
      if (tensor.atom) continue;
      const auto blob = static_cast<uint32_t>(tensor.blob);
      const auto range = RangeOf(tensor);
      if (numbers_[blob]) {
        tensor.blob = BlobIndex{*numbers_[blob]};
      } else if (range) {
        auto found = of_range_.upper_bound({blob, range->begin});
        --found;
        const Entry& entry = entries_[found->second];
        tensor.blob = BlobIndex{packed_blobs_[entry.file]};
        tensor.offset = entry.place + (range->begin - found->first.second);
      } else {
        tensor.blob = BlobIndex{};  // of no elements
        tensor.offset = 0;
      }
    }
  }
}

// The new numbers of files, and which files of a tool are packed.
Status Planner::FillFacts() {
  StepFacts& facts = plan_.model.facts;
  const auto number = [&](BlobIndex blob) { return numbers_[static_cast<uint32_t>(blob)]; };
  for (ModelFile& file : facts.model_files.files) {
    auto* const blob = std::get_if<BlobIndex>(&file.body);
    if (blob == nullptr) continue;
    const auto now = number(*blob);
    if (!now) return Fail(ErrorCode::kInternal, StrCat("model file '", file.name, "' is gone"));
    *blob = BlobIndex{*now};
  }
  facts.safetensors.clear();
  for (const auto& [blob, offset] : step_.facts.safetensors) {
    const auto now = number(blob);
    if (!now) return Fail(ErrorCode::kInternal, "a safetensors file that is shown is gone");
    facts.safetensors.emplace(BlobIndex{*now}, offset);
  }
  if (!facts.tool) return {};
  for (const auto& [path, blob] : FilesOf(*step_.facts.tool, step_.blobs)) {
    if (!number(blob)) facts.tool->packed.insert(path);
  }
  return {};
}

Result<CompactPlan> Planner::Plan(const ShownWhole& shown_whole, uint64_t file_bytes) {
  CKPT_RETURN_IF_ERROR(ChooseKept(shown_whole));
  ChooseInPlace();
  CollectEntries();
  Arrange(file_bytes);
  CKPT_RETURN_IF_ERROR(FindGates());
  plan_.model = WithoutSideBlob(step_);
  plan_.model.index.reset();
  plan_.model.roots.clear();
  plan_.model.blobs.clear();
  CKPT_RETURN_IF_ERROR(PlanPacked());
  NumberBlobs();
  CKPT_RETURN_IF_ERROR(FillBlobs());
  FillAtoms();
  for (const std::string& line : plan_.lost) {
    plan_.model.notes.push_back(StrCat(kNotShownNote, "'", line.substr(0, line.find(": ")),
                                       "', which changed after the step was adopted"));
  }
  CKPT_RETURN_IF_ERROR(FillFacts());
  plan_.model.BuildIndex();
  return std::move(plan_);
}

}  // namespace

void CompactPlan::SetDirectory(const std::string& directory) {
  for (size_t r = 0; r < model.roots.size(); ++r) {
    if (!model.roots[r].empty()) continue;
    const bool packed = packed_files > 0 && r + 1 == model.roots.size();
    model.roots[r] = packed ? directory : StrCat(directory, "/root", r);
  }
}

Result<CompactPlan> PlanCompact(const StepModel& step, const std::string& source, BlobReader& blobs,
                                const ShownWhole& shown_whole, uint64_t file_bytes) {
  return Planner(step, source, blobs).Plan(shown_whole, file_bytes);
}

}  // namespace ckptfs
