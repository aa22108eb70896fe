// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_file/rank_files.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/parallel.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/state/assembler.h"
#include "core/state/rank_file.h"
#include "core/state/shared_rows.h"
#include "core/state/state_dict.h"
#include "formats/rank_file/deepspeed_files.h"
#include "formats/rank_file/rank_entry.h"
#include "formats/settle/settle.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

// The document of a rank that becomes StepFacts::keys.
constexpr std::string_view kSpelling = "ckptfs.dcp";

constexpr uint64_t kMaxPickle = uint64_t{256} << 20;
constexpr uint64_t kMaxInline = 64;

class RankFilesReader {
 public:
  RankFilesReader(std::shared_ptr<const Root> root, const std::vector<std::string>& paths,
                  const SourceOptions& options)
      : root_(std::move(root)), paths_(paths), options_(options) {}

  Result<StepModel> Read() && {
    const uint32_t root = assembler_.AddRoot(root_);
    std::vector<Result<OpenEntry>> opened = OpenAll();
    for (size_t rank = 0; rank < paths_.size(); ++rank) {
      CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler_.AddFile(root, paths_[rank]));
      blobs_.push_back(blob);
      if (Status read = TakeEntry(rank, std::move(opened[rank])); !read) {
        return Fail(std::move(read).error().WithContext(root_->PathOf(paths_[rank])));
      }
    }
    CKPT_RETURN_IF_ERROR(CheckAlike());
    CKPT_RETURN_IF_ERROR(CheckMoments());
    if (entries_[0].framework == kDeepSpeedRankFile) return std::move(*this).ReadDeepSpeed();
    CKPT_RETURN_IF_ERROR(FindWeights());
    CKPT_RETURN_IF_ERROR(FindModel());
    for (size_t rank = 0; rank < paths_.size(); ++rank) {
      if (Status read = ReadContent(rank); !read) {
        return Fail(std::move(read).error().WithContext(root_->PathOf(paths_[rank])));
      }
    }
    CKPT_RETURN_IF_ERROR(AddTensors());
    CKPT_RETURN_IF_ERROR(AddStates());
    CKPT_ASSIGN_OR_RETURN(dict_.sizes.recorded, RecordedSizes());
    dict_.sizes.given = WithCommonSpellings(options_.variables);
    CKPT_RETURN_IF_ERROR(Settle(dict_, options_, assembler_));
    CKPT_RETURN_IF_ERROR(FillHeader());
    return std::move(assembler_).Finish();
  }

 private:
  using Shapes = std::map<std::string, Shape, std::less<>>;

  // A rank's file and what it says of itself.
  struct OpenEntry {
    std::shared_ptr<const File> file;
    RankEntry entry;
  };
  std::vector<Result<OpenEntry>> OpenAll() const;
  Status TakeEntry(size_t rank, Result<OpenEntry> opened);
  Result<StepModel> ReadDeepSpeed() &&;
  void NoteUnproved();
  Status CheckAlike() const;
  Status CheckMoments() const;
  Status FindWeights();
  Status FindModel();
  Result<FamilyVariables> RecordedSizes() const;
  Status AddTensors();
  Status AddStates();
  size_t OptimizerOf(const std::string& label);
  Status ReadContent(size_t rank);
  struct Place {
    BlobIndex blob{};
    uint64_t offset = 0;
  };
  // A state of a parameter as the ranks hold it: one has all of it, or several have parts.
  struct Held {
    size_t rank = 0;  // the first that holds it
    std::vector<std::pair<const StateTensor*, Place>> parts;
    const StateTensor& first() const { return *parts.front().first; }
  };
  Status CollectState(size_t rank, const StateTensor& tensor);
  static Status PlaceState(const Held& held, Assembler& assembler, AtomIndex atom);
  // A rank's file of an earlier save, which tensors are kept in.
  struct EarlierFile {
    BlobIndex blob{};
    uint64_t data_offset = 0;
    std::map<std::string, SafetensorsEntry> entries;  // by key
  };
  Result<Place> PlaceOf(size_t rank, const StateTensor& tensor);
  Result<const EarlierFile*> EarlierFileAt(const std::string& path);
  Status AddGroup(size_t rank, size_t place, const RankGroup& group);
  Status KeepSpelling(const RankDocument& document);
  Status AddDocument(size_t rank, const RankDocument& document);
  Status FillHeader();
  Result<std::string> BytesOf(size_t rank, const SafetensorsEntry& entry, uint64_t limit) const;
  Result<PickleTree> TreeOf(size_t rank, const SafetensorsEntry& entry) const;
  Status CheckNamed(const std::string& name) const;

  const std::shared_ptr<const Root> root_;
  const std::vector<std::string>& paths_;
  const SourceOptions& options_;
  Assembler assembler_;
  std::vector<BlobIndex> blobs_;  // by rank, as are these
  std::vector<std::shared_ptr<const File>> files_;
  std::vector<RankEntry> entries_;
  Shapes shapes_;                                       // of the parameters
  std::vector<std::pair<std::string, Role>> declared_;  // the parameters, in model order
  std::map<std::string_view, Role> roles_;
  std::deque<Held> held_;  // in the order in which they were met
  // By parameter, optimizer, kind.
  std::map<std::tuple<std::string_view, std::string_view, std::string_view>, Held*> held_by_name_;
  StateDict dict_;
  std::map<std::pair<size_t, size_t>, size_t> group_at_;           // optimizer, place: its number
  std::map<std::pair<size_t, std::string_view>, size_t> grouped_;  // optimizer, name: the same
  std::map<std::string, EarlierFile> earlier_;                     // by path
};

// Tells local tensors apart.
std::vector<uint64_t> WordsOf(const LocalTensor& local) {
  std::vector<uint64_t> words = local.shape;
  for (const Piece& piece : local.pieces) {
    words.push_back(piece.local_offset);
    words.insert(words.end(), piece.local_strides.begin(), piece.local_strides.end());
    words.insert(words.end(), piece.atom_begin.begin(), piece.atom_begin.end());
    words.insert(words.end(), piece.shape.begin(), piece.shape.end());
  }
  return words;
}

// Parsing headers is most of what a model of many ranks costs, and no rank's depends on another's.
std::vector<Result<RankFilesReader::OpenEntry>> RankFilesReader::OpenAll() const {
  std::vector<Result<OpenEntry>> opened(paths_.size());
  ParallelFor(paths_.size(), [&](size_t rank) {
    opened[rank] = Caught([&]() -> Result<OpenEntry> {
      CKPT_ASSIGN_OR_RETURN(const auto file, root_->Open(paths_[rank]));
      CKPT_ASSIGN_OR_RETURN(const SafetensorsHeader header, HeaderOf(*file));
      CKPT_ASSIGN_OR_RETURN(RankEntry entry, ParseRankEntry(header));
      return OpenEntry{file, std::move(entry)};
    });
  });
  return opened;
}

Status RankFilesReader::TakeEntry(size_t rank, Result<OpenEntry> opened) {
  if (!opened) return Fail(std::move(opened).error());
  RankEntry& entry = opened->entry;
  if (entry.rank != rank || entry.world != paths_.size()) {
    return Refuse("belongs to rank ", entry.rank, " of ", entry.world,
                  ", not to "
                  "rank ",
                  rank, " of ", paths_.size());
  }
  if (rank > 0 && entry.step != entries_[0].step) {
    return Refuse("belongs to step ", entry.step, ", but rank 0's file to step ", entries_[0].step);
  }
  if (!entry.layout.empty() && rank > 0 && entry.layout != entries_[0].layout) {
    return Refuse("has layout '", entry.layout,
                  "', but rank 0's file "
                  "has '",
                  entries_[0].layout, "'");
  }
  files_.push_back(std::move(opened->file));
  entries_.push_back(std::move(entry));
  return {};
}

Result<StepModel> RankFilesReader::ReadDeepSpeed() && {
  std::vector<OpenRankFile> ranks;
  for (size_t rank = 0; rank < paths_.size(); ++rank) {
    ranks.push_back({&entries_[rank], files_[rank], blobs_[rank]});
  }
  const std::string& first = paths_.front();
  const std::string directory = first.substr(0, first.find_last_of('/'));
  NoteUnproved();
  return ReadDeepSpeedFiles(root_, directory, ranks, options_, std::move(assembler_));
}

// Those who shared out what they hold shared out the same.
Status RankFilesReader::CheckAlike() const {
  std::map<std::pair<std::string_view, uint64_t>, uint64_t> said;
  for (const RankEntry& entry : entries_) {
    for (const auto& [digest, ranks] : entry.alike) ++said[{digest, ranks}];
  }
  const auto first_uneven = [&](bool bytes) {
    return std::ranges::find_if(said, [&](const auto& one) {
      const auto& [alike, times] = one;
      return times != alike.second && alike.first.starts_with(kAlikeBytes) == bytes;
    });
  };
  if (const auto uneven = first_uneven(false); uneven != said.end()) {
    return Refuse("only ", uneven->second, " of ", uneven->first.second,
                  " ranks that share states out "
                  "hold the same states (does an optimizer have states on some ranks only?)");
  }
  if (const auto uneven = first_uneven(true); uneven != said.end()) {
    return Refuse(
        "only ", uneven->second, " of ", uneven->first.second,
        " ranks that must hold the same bytes do: replicas came apart (local SGD, a step within "
        "no_sync()?); save when they are averaged, the optimizer's states too");
  }
  return {};
}

// Ranks that went on from one step, and update the same parameters, were updated as often:
// "since:RANK:STEP:UPDATES:PARAMETERS".
Status RankFilesReader::CheckMoments() const {
  struct Moment {
    std::string_view rank;
    std::string_view updates;
  };
  std::map<std::pair<std::string_view, std::string_view>, Moment> known;
  for (const RankEntry& entry : entries_) {
    for (const auto& [text, ranks] : entry.alike) {
      std::string_view rest = text;
      if (!rest.starts_with(kAlikeSince)) continue;
      const auto word = [&] {
        const size_t end = std::min(rest.find(':'), rest.size());
        const std::string_view found = rest.substr(0, end);
        rest.remove_prefix(std::min(end + 1, rest.size()));
        return found;
      };
      rest.remove_prefix(kAlikeSince.size());
      const std::string_view rank = word(), before = word(), updates = word();
      const auto [first, added] = known.try_emplace({before, word()}, Moment{rank, updates});
      if (added || first->second.updates == updates) continue;
      return Refuse("rank ", first->second.rank, " was updated ", first->second.updates,
                    " times since ",
                    before == "-1" ? "the job began" : StrCat("it saved step ", before),
                    ", but rank ", rank, " ", updates, " times: their parts are not of one moment");
    }
  }
  return {};
}

// A parameter has the shape of its weight.
Status RankFilesReader::FindWeights() {
  std::set<std::string_view> whole;
  for (const RankEntry& entry : entries_) {
    for (const StateTensor& tensor : entry.tensors) {
      if (tensor.kind != "weight") continue;
      if (!tensor.optimizer.empty())
        return Refuse("an optimizer cannot have a weight: '", tensor.parameter, "'");
      if (const auto elements = ElementCount(tensor.whole()); !elements) {
        return Fail(Error(elements.error()).WithContext(StrCat("'", tensor.parameter, "'")));
      }
      const auto [known, added] = shapes_.emplace(tensor.parameter, tensor.whole());
      if (!added && (!tensor.part || whole.contains(tensor.parameter))) {
        return Refuse("two ranks hold the weight '", tensor.parameter,
                      "', and one of them holds "
                      "all of it");
      }
      if (known->second != tensor.whole()) {
        return Refuse("the weight '", tensor.parameter, "' has shape ",
                      ShapeToString(known->second), " on one rank and ",
                      ShapeToString(tensor.whole()), " on another");
      }
      if (!tensor.part) whole.insert(tensor.parameter);
    }
  }
  return {};
}

// Rank 0's parameters, then those that only others have.
Status RankFilesReader::FindModel() {
  for (size_t rank = 0; rank < entries_.size(); ++rank) {
    std::set<std::string_view> own;
    for (const auto& [name, role] : entries_[rank].parameters) {
      if (!own.insert(name).second)
        return Refuse(
            "there are two "
            "parameters '",
            name, "' on rank ", rank);
      const auto [known, added] = roles_.emplace(name, role);
      if (added) declared_.emplace_back(name, role);
      if (known->second != role) {
        return Refuse("'", name, "' has another role on rank ", rank, " than on those before");
      }
    }
  }
  return {};
}

// The numbers of rank 0's document "args": a dict, or an object such as argparse's.
Result<FamilyVariables> RankFilesReader::RecordedSizes() const {
  FamilyVariables numbers;
  for (const RankDocument& document : entries_[0].documents) {
    if (document.key != "args") continue;
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree, TreeOf(0, document.pickle));
    const PickleRef args = RootOf(tree);
    const PickleRef dict = args.IsDict() ? args : args.State();
    if (!dict || !dict.IsDict()) continue;
    for (const auto& [key, value] : dict.Items()) {
      const auto name = key.String();
      const auto number = value.Int();
      if (name && number && *number > 0) numbers[std::string(*name)] = *number;
    }
  }
  return WithCommonSpellings(std::move(numbers));
}

Status RankFilesReader::CheckNamed(const std::string& name) const {
  if (roles_.contains(name)) return {};
  return Refuse("no rank declares a parameter '", name, "'");
}

Status RankFilesReader::AddTensors() {
  for (const auto& [name, role] : declared_) {
    const auto weight = held_by_name_.find({name, "", "weight"});
    if (weight == held_by_name_.end()) {
      return Refuse("the ranks do not hold the weight '", name, "'");
    }
    const StateTensor& tensor = weight->second->first();
    const auto place = [held = weight->second](Assembler& assembler, AtomIndex atom) {
      return PlaceState(*held, assembler, atom);
    };
    dict_.tensors.push_back({name, tensor.entry.dtype, tensor.whole(), place, role});
  }
  for (const RankEntry& entry : entries_) {
    for (const auto& [alias, name] : entry.aliases) {
      CKPT_RETURN_IF_ERROR(CheckNamed(name));
      if (roles_.contains(alias)) return Refuse("'", alias, "' is a parameter and an alias");
      dict_.second_names.emplace_back(alias, name);
    }
  }
  return {};
}

size_t RankFilesReader::OptimizerOf(const std::string& label) {
  auto& known = dict_.optimizers;
  const auto found = std::ranges::find(known, label, &StateDict::Optimizer::label);
  const auto number = static_cast<size_t>(found - known.begin());
  if (number == known.size()) known.push_back({.label = label, .what = "", .shown = ""});
  return number;
}

Status RankFilesReader::AddStates() {
  for (const Held& held : held_) {
    const StateTensor& tensor = held.first();
    if (tensor.kind == "weight") continue;
    StateDict::State& added = dict_.states.emplace_back(
        StateDict::State{OptimizerOf(tensor.optimizer), tensor.parameter, tensor.kind});
    added.dtype = tensor.entry.dtype;
    added.shape = tensor.whole();
    added.kinds = StateDict::Kinds::kOurs;
    added.place = [&held](Assembler& assembler, AtomIndex atom) {
      return PlaceState(held, assembler, atom);
    };
    added.scalar = [this, &held]() -> Result<std::optional<ScalarValue>> {
      const StateTensor& number = held.first();
      CKPT_ASSIGN_OR_RETURN(std::string bytes, BytesOf(held.rank, number.entry, kMaxInline));
      return std::optional(
          ScalarValue{number.entry.dtype, number.whole(), std::move(bytes), number.number});
    };
  }
  return {};
}

Status RankFilesReader::ReadContent(size_t rank) {
  const RankEntry& entry = entries_[rank];
  for (const StateTensor& tensor : entry.tensors) {
    CKPT_RETURN_IF_ERROR(CollectState(rank, tensor));
  }
  std::map<std::string_view, size_t> places;
  for (const RankGroup& group : entry.groups) {
    CKPT_RETURN_IF_ERROR(AddGroup(rank, places[group.optimizer]++, group));
  }
  for (const RankDocument& document : entry.documents) {
    CKPT_RETURN_IF_ERROR(AddDocument(rank, document));
  }
  return {};
}

Result<const RankFilesReader::EarlierFile*> RankFilesReader::EarlierFileAt(
    const std::string& path) {
  const auto known = earlier_.find(path);
  if (known != earlier_.end()) return &known->second;
  EarlierFile earlier;
  CKPT_ASSIGN_OR_RETURN(earlier.blob, assembler_.AddFile(0, path));
  CKPT_ASSIGN_OR_RETURN(const auto file, root_->Open(path));
  CKPT_ASSIGN_OR_RETURN(SafetensorsHeader header, HeaderOf(*file));
  earlier.data_offset = header.data_offset;
  for (SafetensorsEntry& entry : header.entries) {
    std::string key = entry.name;
    earlier.entries.emplace(std::move(key), std::move(entry));
  }
  return &earlier_.emplace(path, std::move(earlier)).first->second;
}

// Where a tensor's bytes begin.
Result<RankFilesReader::Place> RankFilesReader::PlaceOf(size_t rank, const StateTensor& tensor) {
  const SafetensorsEntry& entry = tensor.entry;
  if (tensor.kept.empty()) {
    return Place{blobs_[rank], entries_[rank].data_offset + entry.begin};
  }
  const std::string path = JoinPath(tensor.kept, std::string(LastComponent(paths_[rank])));
  auto earlier = EarlierFileAt(path);
  if (!earlier && earlier.error().code == ErrorCode::kNotFound) {
    return Refuse("'", entry.name, "' is kept in ", path, ", which is gone");
  }
  if (!earlier) return Fail(std::move(earlier).error().WithContext(path));
  const auto found = (*earlier)->entries.find(entry.name);
  const bool same = found != (*earlier)->entries.end() && found->second.dtype == entry.dtype &&
                    found->second.shape == entry.shape;
  if (!same)
    return Refuse("'", entry.name, "' is kept in ", path, ", which does not have such a tensor");
  return Place{(*earlier)->blob, (*earlier)->data_offset + found->second.begin};
}

Status RankFilesReader::CollectState(size_t rank, const StateTensor& tensor) {
  const SafetensorsEntry& entry = tensor.entry;
  CKPT_RETURN_IF_ERROR(CheckNamed(tensor.parameter));
  if (ByteWidth(entry.dtype) == 0) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("'", entry.name, "' has elements of less than a byte"));
  }
  Held*& held = held_by_name_[{tensor.parameter, tensor.optimizer, tensor.kind}];
  if (held == nullptr) held = &held_.emplace_back(Held{rank, {}});
  if (!held->parts.empty()) {
    const StateTensor& known = held->first();
    if (!tensor.part || !known.part) return Refuse("'", entry.name, "' is held twice");
    if (known.entry.dtype != entry.dtype || known.whole() != tensor.whole()) {
      return Refuse("'", tensor.parameter, "' (", tensor.kind, ") is ",
                    DTypeName(known.entry.dtype), " ", ShapeToString(known.whole()),
                    " in one file and ", DTypeName(entry.dtype), " ", ShapeToString(tensor.whole()),
                    " in another");
    }
  }
  const auto shape = shapes_.find(tensor.parameter);
  const bool scalar = tensor.whole().empty() && shape != shapes_.end() && !shape->second.empty();
  if (scalar && !tensor.kept.empty()) {
    return Refuse("'", entry.name, "' is a number, and kept elsewhere");
  }
  if (tensor.part) {
    if (tensor.number || scalar) return Refuse("'", entry.name, "' is a part of a number");
    if (auto checked = LocalRangeOf(*tensor.part, entry.shape); !checked) {
      return Fail(std::move(checked).error().WithContext(StrCat("'", entry.name, "'")));
    }
  }
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(rank, tensor));
  held->parts.emplace_back(&tensor, place);
  return {};
}

// Ranks that hold flat ranges of one local tensor share it, as do those that hold boxes densely.
Status RankFilesReader::PlaceState(const Held& held, Assembler& assembler, AtomIndex atom) {
  std::optional<SharedRows> rows;
  std::map<std::vector<uint64_t>, uint32_t> locals;
  for (const auto& [tensor, place] : held.parts) {
    const SafetensorsEntry& entry = tensor->entry;
    LocalRange range;
    if (tensor->part) {
      CKPT_ASSIGN_OR_RETURN(range, LocalRangeOf(*tensor->part, entry.shape));
    } else {
      CKPT_ASSIGN_OR_RETURN(range.end, ElementCount(entry.shape));
      range.local = WholeTensor(entry.shape);
    }
    const Fragment fragment{range.begin, range.end, place.blob, place.offset, entry.dtype};
    auto boxes = tensor->part ? DenseBoxesOf(*tensor->part, entry.shape, fragment) : std::nullopt;
    if (boxes) {
      if (!rows) rows.emplace(tensor->whole());
      for (DenseBox& box : *boxes) rows->Add(std::move(box));
      continue;
    }
    const auto [at, added] = locals.try_emplace(WordsOf(range.local), 0);
    if (added) at->second = assembler.AddLocal(atom, 0, range.local);
    assembler.AddFragment(atom, 0, at->second, fragment);
  }
  if (rows) std::move(*rows).Place(assembler, atom, 0, SharedRows::Beside::kOthers);
  return {};
}

Result<std::string> RankFilesReader::BytesOf(size_t rank, const SafetensorsEntry& entry,
                                             uint64_t limit) const {
  if (entry.end - entry.begin > limit) {
    return Refuse("'", entry.name, "' has ", entry.end - entry.begin, " bytes");
  }
  return files_[rank]->Read(entries_[rank].data_offset + entry.begin, entry.end - entry.begin,
                            entry.name);
}

Result<PickleTree> RankFilesReader::TreeOf(size_t rank, const SafetensorsEntry& entry) const {
  CKPT_ASSIGN_OR_RETURN(const std::string bytes, BytesOf(rank, entry, kMaxPickle));
  auto parsed = ParsePickle(bytes);
  if (!parsed) return Fail(std::move(parsed).error().WithContext(entry.name));
  return std::move(parsed->tree);
}

// Ranks that hold other parameters have other parts of a group.
Status RankFilesReader::AddGroup(size_t rank, size_t place, const RankGroup& group) {
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, TreeOf(rank, group.pickle));
  if (!RootOf(tree).IsDict()) return Refuse("'", group.pickle.name, "' is not a dict");
  CKPT_ASSIGN_OR_RETURN(const std::string hyper_parameters, PrintPickle(tree));
  const size_t optimizer = OptimizerOf(group.optimizer);
  const auto [at, added] = group_at_.try_emplace({optimizer, place}, dict_.groups.size());
  if (added) dict_.groups.push_back({optimizer, hyper_parameters, {}});
  StateDict::Group& united = dict_.groups[at->second];
  if (united.hyper_parameters != hyper_parameters) {
    return Refuse("group ", place, " of optimizer '", group.optimizer,
                  "' has other hyper-parameters than on the ranks before");
  }
  for (const std::string& name : group.parameters) {
    CKPT_RETURN_IF_ERROR(CheckNamed(name));
    const auto [in, first] = grouped_.try_emplace({optimizer, name}, at->second);
    if (in->second != at->second) {
      return Refuse("'", name, "' is in two groups of optimizer '", group.optimizer, "'");
    }
    if (first) united.members.push_back({name, std::nullopt});
  }
  return {};
}

// Which keys of a state dict the model and the optimizers stood under, which DCP saved
// (snapshot/python/ckptfs/saved_values.py).
Status RankFilesReader::KeepSpelling(const RankDocument& document) {
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, TreeOf(0, document.pickle));
  const PickleRef given = RootOf(tree);
  KeyShape& keys = assembler_.header().facts.keys.emplace();
  if (const auto model = given["model"].String()) keys.model = *model;
  for (const auto& [label, key] : given["optimizers"].Items()) {
    if (label.String() && key.String()) keys.optimizers.emplace(*label.String(), *key.String());
  }
  return {};
}

Status RankFilesReader::AddDocument(size_t rank, const RankDocument& document) {
  if (document.key == kSpelling) return rank == 0 ? KeepSpelling(document) : Status();
  Document added{.key = document.key, .scope = document.scope, .pickle = {}, .tensors = {}};
  for (const SafetensorsEntry& entry : document.tensors) {
    added.tensors.push_back({entry.dtype, entry.shape, RowMajorStrides(entry.shape), blobs_[rank],
                             entries_[rank].data_offset + entry.begin});
  }
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, TreeOf(rank, document.pickle));
  CKPT_ASSIGN_OR_RETURN(added.pickle, PrintPickle(tree));
  CKPT_RETURN_IF_ERROR(ParseDocument(added));  // its tensors are there
  assembler_.header().documents.push_back(std::move(added));
  return {};
}

Status RankFilesReader::FillHeader() {
  StepModel& header = assembler_.header();
  header.framework = entries_[0].framework;
  header.framework_version = entries_[0].framework_version;
  header.id = std::to_string(entries_[0].step);
  header.iteration = entries_[0].step;
  header.layout.dp = static_cast<uint32_t>(entries_[0].world);
  if (const std::string& layout = entries_[0].layout; !layout.empty()) {
    CKPT_ASSIGN_OR_RETURN(header.layout, Layout::Parse(layout));
    if (header.layout.World() != entries_[0].world) {
      return Refuse("layout '", layout, "' has ", header.layout.World(), " ranks, but the job has ",
                    entries_[0].world);
    }
  }
  NoteUnproved();
  return {};
}

void RankFilesReader::NoteUnproved() {
  uint64_t bytes = 0;
  for (const RankEntry& entry : entries_) bytes += std::min(entry.unproved, UINT64_MAX - bytes);
  if (bytes == 0) return;
  assembler_.header().notes.push_back(StrCat("unproved: a write of ", bytes,
                                             " bytes between the save and its copy could have gone "
                                             "unseen (no kernel or GPU support for a proof)"));
}

}  // namespace

Result<StepModel> ReadRankFiles(const std::shared_ptr<const Root>& root,
                                const std::vector<std::string>& paths,
                                const SourceOptions& options) {
  if (paths.empty()) return Refuse("no rank files");
  return RankFilesReader(root, paths, options).Read();
}

}  // namespace ckptfs
