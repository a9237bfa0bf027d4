import std.stdio, std.algorithm, std.array, std.conv, std.string;
interface Shape { double area(); }
class Circle : Shape { double r; this(double r) { this.r = r; } double area() { return 3.14*r*r; } }
class Square : Shape { double s; this(double s) { this.s = s; } double area() { if (s < 0) throw new Exception("no"); return s*s; } }
int pick(string w) { switch (w) { case "one": return 1; case "two": return 2; case "three": return 3; default: return w.length.to!int; } }
void main() {
  int[string] count;
  foreach (line; stdin.byLine) foreach (w; line.split) { count[w.idup]++; }
  foreach (k; count.keys.sort) writefln("%s %s %s", k, count[k], pick(k));
  Shape[] l = [cast(Shape) new Circle(2), new Square(3)];
  try { writeln(l.map!(s => s.area).sum); } catch (Exception e) { writeln(e.msg); }
}
