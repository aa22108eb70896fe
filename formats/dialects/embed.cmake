# cmake -DOUTPUT=FILE -DTABLE=hf5.toml -P embed.cmake: the text as a C++ source.
file(READ ${TABLE} text)
file(WRITE ${OUTPUT}.new "// Made from formats/dialects/hf5.toml.
#include \"formats/dialects/shipped.h\"

namespace ckptfs {

std::string_view Hf5DialectText() {
  static constexpr char text[] = R\"table(${text})table\";
  return {text, sizeof text - 1};
}

}  // namespace ckptfs
")
file(RENAME ${OUTPUT}.new ${OUTPUT})
